/* What differs from pass to pass, as `fxq/picture/diff_picture.py` found it. */

/** What pass `i` changed, both graphs in one. `order`: the drawn nodes of both, removed ones before what they became.
 * `mark`: added, removed, changed or rewired, by name. `told`: what changed at a node, as texts. `became`: removed → its
 * heirs.
 * @typedef {{before: Graph, after: Graph, order: NodeRecord[], mark: Map<string, string>, told: Map<string, string[]>,
 *   became: Map<string, string[]>, counts: Record<string, number>}} Diff */

/** @type {(i: number) => Diff|null} */
const diffOf = memo((i) => {
  const found = passes[i].diff;
  if (!found) return null;
  const [mark, told, became] = [found.mark, found.told, found.became].map((record) => new Map(Object.entries(record)));
  const order = found.order.map((id) => data.nodes[id]);
  const counts = { added: 0, removed: 0, changed: 0, rewired: 0 };
  for (const kind of mark.values()) counts[kind]++;
  return { before: graphOf(i - 1), after: graphOf(i), order, mark, told, became, counts };
});
