"""The run's hub: channel metadata, device lock, calls and health over stream sockets."""
