"""The kernel's side of libibverbs, for programs that use software NICs without knowing it."""
