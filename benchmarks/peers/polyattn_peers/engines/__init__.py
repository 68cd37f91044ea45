"""One engine a file: ``prepare(call)`` returns a :class:`polyattn_peers.call.Prepared`."""
