"""Argument and result trees: a *structure* (bytes) with numbered holes, and the leaves that fill them.

The structure is msgpack: what does not change from call to call (containers, keywords, Python
scalars, strings) as bytes that compare, hash and cache, while tensors are numbered in order of
appearance. Types msgpack lacks are extension types (the table below). Nothing received is
imported or evaluated: a namedtuple or dataclass is rebuilt with the receiver's own class where one
of that name and those fields is loaded already, and with a stand-in of the same shape where not.

=====  ===========  ================================================================
code   meaning      payload (msgpack unless said otherwise)
=====  ===========  ================================================================
1      leaf         its number, from 0
2      tuple        array of the items
3      complex      16 bytes: real, imaginary as big-endian doubles
4      integer      signed big-endian bytes; only what does not fit 64 bits
5      scalar       [numpy dtype, bytes in little-endian order]
6      namedtuple   [module, qualname, field names, values]; Python's struct sequences too
7      dataclass    [module, qualname, field names, values]; of one that is a mapping as well also
                    [..., the names of the fields that are items]
8      OrderedDict  array of [key, value]
9      weak         [numbers of leaves, the tree]; outermost only: these leaves are
                    weakly typed in JAX, since they stand for Python numbers
=====  ===========  ================================================================

msgpack has no types for bytearray and memoryview: they arrive as bytes.

The modules: `flattening` makes structures of trees, and `filling` trees of structures. Below them, `format` has codes and limits,
`reading` makes trees of bytes, `values` knows what msgpack has no type for, `stand_ins` makes classes for what is not loaded here, and
`keys` are scalars in places where no leaf can be, such as a dict's keys. `places` names leaves by their paths, and `weak` says which leaves
stand for Python numbers.
"""

from __future__ import annotations

from gradwire_wire.structures.filling import fill, fill_call, positional_count
from gradwire_wire.structures.flattening import AS_TUPLES, LONE_LEAF, flatten, positional
from gradwire_wire.structures.format import LEAF, MAX_BYTES, MAX_CACHED, MAX_DEPTH, TUPLE, Leaf
from gradwire_wire.structures.places import fill_leaves_only, leaf_paths, leaves_like, naming
from gradwire_wire.structures.reading import leaf_count
from gradwire_wire.structures.stand_ins import on_stand_in, on_struct_sequence
from gradwire_wire.structures.weak import weak_leaves, with_weak

__all__ = [
    "AS_TUPLES",
    "LEAF",
    "LONE_LEAF",
    "MAX_BYTES",
    "MAX_CACHED",
    "MAX_DEPTH",
    "TUPLE",
    "Leaf",
    "fill",
    "fill_call",
    "fill_leaves_only",
    "flatten",
    "leaf_count",
    "leaf_paths",
    "leaves_like",
    "naming",
    "on_stand_in",
    "on_struct_sequence",
    "positional",
    "positional_count",
    "weak_leaves",
    "with_weak",
]
