"""Running plans that use a GPU: devices (CUDA and simulated), mailboxes, the executor."""
