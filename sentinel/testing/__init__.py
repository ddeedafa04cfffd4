"""Parts that stand in for the world in tests, public so that a site can test its own probes: a fake NVML, a kernel-log
writer, trees like /sys for PCI and InfiniBand, a pager that records. None of them replaces a module of sentinel; each stands
where hardware or a service would."""
