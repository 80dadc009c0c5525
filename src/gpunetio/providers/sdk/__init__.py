"""The DOCA SDK's control path, used for a hardware device instead of gpunetio's own. See docs/sdk-mode.md."""
