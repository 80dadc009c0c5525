"""The DOCA SDK's control path in place of gpunetio's own, for a hardware device. See docs/sdk-mode.md."""
