"""The DOCA SDK's control path instead of gpunetio's own, for a hardware device: see docs/sdk-mode.md."""
