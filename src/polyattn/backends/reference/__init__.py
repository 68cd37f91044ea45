"""The definition of what every backend computes, in float64."""
