"""What a trial found, with its interval and n."""
