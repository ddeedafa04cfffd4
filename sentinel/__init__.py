"""sentinel: reliability and observability for fleets that serve large language models on GB200 NVL72 racks."""

__version__ = "0.1.0"
