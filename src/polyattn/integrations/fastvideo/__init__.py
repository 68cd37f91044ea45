"""The selector and the layers of FastVideo and of code bases written like it, by their names."""
