/* Which module, or which run of a long module, a node is shown in. The answer is the same for every pass: it comes from
   the place of a node's origins in the traced graph, so that groups neither jump nor change their names.

   A module that is called twice is two groups. A module with very many parts is cut into runs of parts. */

const MOST_PARTS = 60; // of a group that is not cut
const RUN = 48; // parts in a run, at most

const tracedGraph = passes.length ? graphOf(0) : null;
const END = tracedGraph ? tracedGraph.drawn.length : 0;

/** Place of a traced op in execution order, by name. */
const places = new Map();
for (const [place, node] of (tracedGraph?.drawn ?? []).entries()) {
  if (node.kind === "io") places.set(node.name, node.label === "output" ? END : -1);
  else places.set(node.name, place);
}

/** The paths of a module and of those around it, outermost first. @type {(path: string) => string[]} */
const prefixes = memo((path) => {
  const parts = path ? path.split(".") : [];
  return parts.map((_, k) => parts.slice(0, k + 1).join("."));
});

/** For each pass, the place of each drawn node: of its last origin; else of what it reads, else of who reads it. */
const placesIn = memo((i) => {
  const graph = graphOf(i);
  const found = new Map();
  const waiting = new Map(); // what has no place yet, by who reads it
  let latest = -1;
  for (const node of graph.drawn) {
    let place = -Infinity;
    for (const origin of node.origins) place = Math.max(place, places.get(origin) ?? -Infinity);
    if (place === -Infinity) place = places.get(node.name) ?? -Infinity;
    if (place === -Infinity) for (const input of node.inputs) place = Math.max(place, found.get(input) ?? -Infinity);
    if (place === -Infinity) {
      const reader = graph.readers.get(node.name)?.[0];
      if (reader !== undefined) put(waiting, reader, node.name);
      place = latest;
    }
    found.set(node.name, place);
    latest = Math.max(latest, Math.min(place, END - 1));
    for (const name of waiting.get(node.name) ?? EMPTY) found.set(name, place);
  }
  return found;
});

/** Names by the places of their nodes in graph `i`; constants, and what it does not have, come last. @param {string[]} names */
function inOrder(i, names) {
  if (i < 0) return names;
  const place = (name) => placesIn(i).get(name) ?? passes[i].nodes.length;
  return [...names].sort((a, b) => place(a) - place(b));
}

/** Index of the last of the sorted `starts` that is not above `place`; 0 where all are. */
const slot = (starts, place) => Math.max(0, d3.bisectRight(starts, place) - 1);

/** For each module path, where its calls begin: one group for each. */
const calls = new Map();
{
  let before = new Set();
  for (const [place, node] of (tracedGraph?.drawn ?? []).entries()) {
    const inside = new Set(prefixes(node.path));
    for (const path of inside) {
      if (before.has(path)) continue;
      put(calls, path, place);
    }
    if (node.kind !== "io") before = inside;
  }
}

const callKey = (path, place) => {
  const starts = calls.get(path);
  const call = starts ? slot(starts, place) : 0;
  return call ? `${path}#${call + 1}` : path;
};

/** The groups: modules whose call has at least two ops after some pass. */
const isGroup = new Set();
for (let i = 0; i < passes.length; i++) {
  const counts = new Map();
  for (const node of graphOf(i).drawn) {
    if (!node.path || ["io", "constant", "convert", "observer", "size"].includes(node.kind)) continue;
    for (const path of prefixes(node.path)) {
      const key = callKey(path, placesIn(i).get(node.name));
      const count = (counts.get(key) ?? 0) + 1;
      counts.set(key, count);
      if (count === 2) isGroup.add(key);
    }
  }
}

/** @typedef {{key: string, title: string, path: string}} Place  one group on the way to a node */

/** For a group that is cut into runs: for each level, coarse to fine, where its runs begin and what they are called.
 * @type {Map<string, {starts: number[], titles: string[]}[]>} */
const runs = new Map();
{
  const parts = new Map(); // of each group: [place, name of a module or ""]
  const known = new Set();
  for (const [place, node] of (tracedGraph?.drawn ?? []).entries()) {
    if (node.kind === "io") continue;
    let parent = "";
    for (const path of prefixes(node.path)) {
      const key = callKey(path, place);
      if (!isGroup.has(key)) continue;
      if (!known.has(key)) put(parts, parent, [place, path]);
      known.add(key);
      parent = key;
    }
    put(parts, parent, [place, node.path === parent ? "" : node.path]);
  }
  for (const [key, all] of parts) if (all.length > MOST_PARTS) runs.set(key, cutIntoRuns(all));
}

function cutIntoRuns(parts) {
  const levels = [];
  let size = RUN;
  do {
    const count = Math.ceil(parts.length / size);
    const first = d3.range(count).map((k) => Math.floor((k * parts.length) / count));
    const titles = first.map((at, k) => {
      const last = (first[k + 1] ?? parts.length) - 1;
      const named = parts[at][1] && parts[last][1];
      return named ? `${parts[at][1]} – ${lastPart(parts[last][1])}` : `nodes ${at + 1}–${last + 1}`;
    });
    levels.unshift({ starts: first.map((at) => parts[at][0]), titles });
    size *= RUN;
  } while (levels[0].starts.length > MOST_PARTS);
  return levels;
}

/** The groups that a node is in, outermost first. @param {NodeRecord} node @param {number} place @returns {readonly Place[]} */
const groupsOf = (node, place) => (node.kind === "io" ? EMPTY : groupsAt(node.path)(place));

const groupsAt = memo((path) => memo((place) => groupChain(path, place)));

function groupChain(modulePath, place) {
  const chain = [];
  let parent = "";
  const cut = (at) => {
    for (const [level, { starts, titles }] of (runs.get(parent) ?? EMPTY).entries()) {
      const run = slot(starts, at);
      chain.push({ key: `${parent}~${level}.${run}`, title: titles[run], path: "" });
    }
  };
  for (const path of prefixes(modulePath)) {
    const key = callKey(path, place);
    if (!isGroup.has(key)) continue;
    const starts = calls.get(path);
    cut(starts ? starts[slot(starts, place)] : place); // a group is in one run as a whole
    const call = key.slice(path.length + 1);
    chain.push({ key, title: call ? `${path} (call ${call})` : path, path });
    parent = key;
  }
  cut(place);
  return chain;
}
