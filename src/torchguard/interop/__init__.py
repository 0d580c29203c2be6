"""Memory shared with numpy and other buffers: read-only stays read-only, nothing dangles."""
