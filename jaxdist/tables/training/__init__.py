"""The training of tables on servers: the steps of a process, the servers, and their files."""
