"""Where the arrays of attention lie on a mesh of devices, as values that can be printed."""
