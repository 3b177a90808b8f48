"""Every plan against one device."""
