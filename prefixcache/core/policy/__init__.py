"""Which leaf goes next. One policy object serves all namespaces whose blocks take the same slots."""
