"""Layers: every parameter is made together with its ParamSpec, and takes the tp group it is divided over."""
