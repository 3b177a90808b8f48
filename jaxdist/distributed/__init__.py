"""Several processes as one program: who they are, how they meet, agree to stop, and end."""
