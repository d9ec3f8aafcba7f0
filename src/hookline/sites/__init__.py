"""WHERE a hook sits: selecting modules, attaching to them, seeing that hooks fire, taking them off again."""
