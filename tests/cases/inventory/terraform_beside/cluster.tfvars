cluster_name = "lab"
