"""Connections to one server or a cluster, and the commands sent over them."""
