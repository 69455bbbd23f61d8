"""w3pack: 3-bit lookup-table checkpoints and the runtime that executes them."""
