"""Call a model of another process, environment and framework as a local function, gradients included."""
