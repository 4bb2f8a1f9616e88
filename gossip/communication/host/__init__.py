"""What the operating system decides: threads, forked children, open files, TCP's retransmission."""
