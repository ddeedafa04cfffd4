"""What bench/gateway.py puts around a gateway: stand-in workers, the load, processes on one core, and the other proxies."""
