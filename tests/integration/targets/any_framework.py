"""Functions that are the same in every framework, and what user code does with its arguments."""

kept = []


def identity(x):
    return x


def double(x):
    return x * 2


def keep(x):
    """Remember the argument itself and return the first one ever kept."""
    kept.append(x)
    return kept[0] * 1


def both(x, y):
    return x + y, x * 3


def claims_our_names(x, *, self, target, params, parameters, buffers, call, function, module, args, kwargs):
    """What keywords are called is up to the user."""
    return x * self * target * params * parameters * buffers * call * function * module * args * kwargs


def bad(x):
    raise ValueError("bad 42")


def many(x, count):
    return [x + i for i in range(count)]


def total(items):
    return sum(items)
