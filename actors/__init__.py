"""Ray services: node caches, decode pools, placement, metrics and cluster-wide builders."""
