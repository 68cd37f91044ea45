// What went into calls and came out of them, in the order of execution. A call ends before the
// next one that is not inside it begins, which the depth of the rows tells.
const executed = (chosen) => {
  const found = [];
  const open = [];
  const close = (depth, backward) => {
    while (open.length) {
      const last = open[open.length - 1];
      if (rows.depth[last] < depth && rows.backward[last] === backward) return;
      open.pop();
      if (rows.out[last] !== null) found.push(2 * last + 1);
    }
  };
  for (const row of chosen) {
    if (rows.in[row] === null && rows.out[row] === null) continue;
    close(rows.depth[row], rows.backward[row]);
    if (rows.in[row] !== null) found.push(2 * row);
    open.push(row);
  }
  close(-1, -1);
  return Int32Array.from(found);
};
const rowOf = (event) => event >> 1;
const isOut = (event) => (event & 1) === 1;
const errorOf = (event) => isOut(event) ? rows.out[rowOf(event)] : rows.in[rowOf(event)];
