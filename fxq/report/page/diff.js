/* What differs from pass to pass. Nodes are the same when their names are, as in `fxq/picture/diff.py`. */

const FIELDS = ["kind", "label", "body", "options", "shape", "dtype", "scale", "zero_point"];
const SPOKEN = { label: "op", zero_point: "zero point" };

const same = (a, b) => a === b || (Array.isArray(a) && Array.isArray(b) && a.length === b.length && a.every((v, k) => v === b[k]));

/** What pass `i` changed, both graphs in one. `order`: the drawn nodes of both, removed ones before what they became.
 * `mark`: added, removed, changed or rewired, by name. `altered`: those of which more than the inputs changed, constants
 * too. `became`: removed → its heirs.
 * @typedef {{before: Graph, after: Graph, order: NodeRecord[], mark: Map<string, string>, altered: Set<string>,
 *   became: Map<string, string[]>, counts: Record<string, number>}} Diff */

/** @type {(i: number) => Diff|null} */
const diffOf = memo((i) => {
  if (i < 1) return null;
  const before = graphOf(i - 1);
  const after = graphOf(i);
  const mark = new Map();
  const altered = new Set();
  for (const node of after.nodes) {
    const old = before.byName.get(node.name);
    if (old === node) continue;
    if (old === undefined) mark.set(node.name, "added");
    else if (FIELDS.some((field) => !same(old[field], node[field]))) {
      altered.add(node.name);
      mark.set(node.name, "changed");
    } else if (!same(old.inputs, node.inputs)) mark.set(node.name, "rewired");
  }
  for (const node of before.nodes) if (!after.byName.has(node.name)) mark.set(node.name, "removed");
  for (const [reader, constants] of after.constants) {
    if ((!mark.has(reader) || mark.get(reader) === "rewired") && constants.some((c) => altered.has(c.name))) mark.set(reader, "changed");
  }
  const became = heirs(before, after, mark, altered);
  const order = unionOrder(before, after, became);
  const counts = { added: 0, removed: 0, changed: 0, rewired: 0 };
  for (const node of order) if (mark.has(node.name)) counts[mark.get(node.name)]++;
  return { before, after, order, mark, altered, became, counts };
});

/** What changed at a node that both graphs have, as text. @param {Diff} diff @param {string} name */
function toldOf(diff, name) {
  const [old, node] = [diff.before.byName.get(name), diff.after.byName.get(name)];
  if (!old || !node) return EMPTY;
  const constants = (diff.after.constants.get(name) ?? EMPTY).filter((constant) => diff.altered.has(constant.name));
  const texts = constants.flatMap((now) => {
    const changes = differences(diff.before.byName.get(now.name), now, ["shape", "dtype"]);
    return changes.map((text) => `${lastPart(now.label)} ${text}`);
  });
  return [...differences(old, node), ...texts, ...rewiring(old, node)];
}

/** The fields that differ, as text: `dtype float32 → uint8`. The body of a unit is left out: it stands in its box. */
function differences(old, node, fields = FIELDS) {
  const differing = fields.filter((field) => field !== "body" && !same(old[field], node[field]));
  return differing.map((field) => `${SPOKEN[field] ?? field} ${spoken(old[field])} → ${spoken(node[field])}`);
}

function rewiring(old, node) {
  if (same(old.inputs, node.inputs)) return EMPTY;
  const gone = old.inputs.filter((name) => !node.inputs.includes(name));
  const come = node.inputs.filter((name) => !old.inputs.includes(name));
  return [`reads ${gone.join(", ") || "–"} → ${come.join(", ") || "–"}`];
}

/** A field's value as text. */
function spoken(value) {
  if (Array.isArray(value)) return value.join(typeof value[0] === "number" ? "×" : "; ") || "none";
  return value === "" || value === null || value === undefined ? "none" : String(value);
}

const originsOf = (node) => (node.origins.length ? node.origins : [node.name]);

/** For each removed node, the added or changed nodes that stand for the same traced ops. */
function heirs(before, after, mark, altered) {
  const byOrigin = new Map();
  for (const node of after.drawn) {
    if (mark.get(node.name) !== "added" && !altered.has(node.name)) continue;
    for (const origin of originsOf(node)) {
      if (byOrigin.has(origin)) byOrigin.get(origin).push(node.name);
      else byOrigin.set(origin, [node.name]);
    }
  }
  const became = new Map();
  for (const node of before.drawn) {
    if (mark.get(node.name) !== "removed") continue;
    const found = new Set(originsOf(node).flatMap((origin) => byOrigin.get(origin) ?? EMPTY));
    if (found.size) became.set(node.name, [...found]);
  }
  return became;
}

/** The drawn nodes of both graphs: removed ones just before what they became, else behind what stood before them. */
function unionOrder(before, after, became) {
  const ahead = new Map();
  const behind = new Map();
  const put = (map, key, node) => (map.has(key) ? map.get(key).push(node) : map.set(key, [node]));
  let anchor = "";
  for (const node of before.drawn) {
    if (after.byName.has(node.name)) anchor = node.name;
    else if (became.has(node.name)) put(ahead, became.get(node.name)[0], node);
    else put(behind, anchor, node);
  }
  const order = [...(behind.get("") ?? EMPTY)];
  for (const node of after.drawn) {
    for (const gone of ahead.get(node.name) ?? EMPTY) order.push(gone);
    order.push(node);
    for (const gone of behind.get(node.name) ?? EMPTY) order.push(gone);
  }
  return order;
}
