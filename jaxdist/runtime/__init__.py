"""What a program runs on: environment, hardware, topologies, compiled programs kept, processes and
how they meet, agree to stop, and end."""
