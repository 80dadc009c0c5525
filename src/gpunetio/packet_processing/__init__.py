"""DOCA's application `gpu_packet_processing`: kernels receive, count and answer packets of UDP, TCP and ICMP."""
