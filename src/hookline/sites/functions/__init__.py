"""Where a hook sits: functions of torch, operators, custom autograd functions."""
