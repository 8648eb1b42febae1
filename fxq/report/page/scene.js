/* What a pane shows: the boxes of one graph, or of a graph and the one before it, with the groups that they are in and
   the edges between them. A scene does not know which groups are open, nor where anything is. */

/** `kinds`, `marks`: how many nodes inside are of each kind, and changed in each way.
 * @typedef {{key: string, title: string, path: string, parent: Group|null, depth: number, children: (Item|Group)[],
 *   count: number, kinds: Map<string, number>, marks: Record<string, number>, box?: Box, at: number,
 *   item?: Item}} Group  `item`: the region that it opens
 * @typedef {{from: Item, to: Item, pen: "kept"|"added"|"removed"|"became"}} Edge
 * @typedef {{id: string, graph: Graph, diff: Diff|null, items: Map<string, Item>, root: Group, edges: Edge[],
 *   groups: Map<string, Group>, depth: number}} Scene */

/** What a box stands for: a node, or several removed ones that became the same (`members`). */
class Item {
  /** @param {NodeRecord[]} members @param {Diff|null} diff  to mark it with @param {boolean} isOld  whether it is of the graph before */
  constructor(members, diff, isOld = false) {
    this.members = members;
    this.node = members[0];
    this.name = this.node.name;
    this.mark = diff?.mark.get(this.name) ?? "";
    this.told = (!isOld && diff?.told.get(this.name)) || EMPTY;
    /** @type {Group|null} */
    this.parent = null;
    this.at = 0; // among the children of its parent
    /** What a region opens into. @type {Group|null} */
    this.inside = null;
    this.made = null;
  }

  /** Made when it is first seen: in a large graph, most are in closed groups. @returns {Box} */
  get box() {
    return (this.made ??= this.members.length > 1 ? replacedBox(this.members) : boxOf(this.node, this.mark, this.told));
  }
}

const newGroup = (key, title, path, parent) => ({
  key,
  title,
  path,
  parent,
  depth: 0,
  children: [],
  count: 0,
  kinds: new Map(),
  marks: { added: 0, removed: 0, changed: 0, rewired: 0 },
  at: 0,
});

/** Whether a child is a group. @param {Item|Group} child @returns {child is Group} */
const isGroupOf = (child) => "children" in child;

const MOST_SCENES = 10; // of each kind, that are kept

/** The graph after pass `i`. @type {(i: number) => Scene} */
const graphScene = memo((i) => plainScene(`graph ${i}`, graphOf(i), null), MOST_SCENES);

/** The graph before pass `i`, what it took away or changed marked. @type {(i: number) => Scene} */
const beforeScene = memo((i) => (i < 1 ? graphScene(0) : plainScene(`before ${i}`, graphOf(i - 1), diffOf(i))), MOST_SCENES);

/** The graph after pass `i`, what it added or changed marked. @type {(i: number) => Scene} */
const afterScene = memo((i) => (i < 1 ? graphScene(0) : plainScene(`after ${i}`, graphOf(i), diffOf(i))), MOST_SCENES);

function plainScene(id, graph, diff) {
  const scene = emptyScene(id, graph, diff);
  const at = placesIn(graph.index);
  const insides = diff ? new Map() : insidesIn(graph.index);
  for (const node of graph.drawn) {
    const [item, inside] = [new Item([node], diff, graph !== diff?.after), insides.get(node.name)];
    if (inside) addRegion(scene, item, at.get(node.name), inside);
    else addItem(scene, item, at.get(node.name));
  }
  const madeBy = (name) => insides.get(name)?.ends ?? [name];
  for (const item of scene.items.values()) if (!item.inside) addEdges(scene, item, item.node.inputs.flatMap(madeBy), "kept");
  return finished(scene);
}

/** Both graphs of pass `i`, what changed marked; the graph alone for the first pass. @type {(i: number) => Scene} */
const diffScene = memo((i) => {
  const diff = diffOf(i);
  if (!diff) return graphScene(i);
  const { before, after, mark } = diff;
  const scene = emptyScene(`diff ${i}`, after, diff);
  const together = replacedTogether(diff);
  for (const node of diff.order) {
    if (scene.items.has(node.name)) continue; // in the box of another
    const graph = mark.get(node.name) === "removed" ? before : after;
    addItem(scene, new Item(together.get(node.name) ?? [node], diff), placesIn(graph.index).get(node.name));
  }
  for (const [name, item] of scene.items) {
    const old = before.byName.get(name)?.inputs ?? EMPTY;
    const now = after.byName.get(name)?.inputs ?? EMPTY;
    for (const input of now) addEdges(scene, item, [input], !mark.has(name) || old.includes(input) ? "kept" : "added");
    if (mark.has(name)) for (const input of old) if (!now.includes(input)) addEdges(scene, item, [input], "removed");
  }
  for (const [name, heirs] of diff.became) for (const heir of heirs) addEdges(scene, scene.items.get(heir), [name], "became");
  const ends = ({ from, to }) => `${from.name} ${to.name}`;
  const became = new Set(scene.edges.filter((edge) => edge.pen === "became").map(ends)); // an old edge says nothing more there
  const once = new Map(scene.edges.map((edge) => [`${ends(edge)} ${edge.pen}`, edge])).values();
  scene.edges = [...once].filter((edge) => edge.pen !== "removed" || !became.has(ends(edge)));
  return finished(scene);
}, MOST_SCENES);

/** For each removed node, those that became the same nodes and stood in the same module, or became a region: they share a box. */
function replacedTogether({ before, after, became }) {
  const at = placesIn(before.index);
  const groups = d3.group(became.keys(), (name) => {
    const node = before.byName.get(name);
    if (after.byName.get(became.get(name)[0])?.precisions.length) return became.get(name)[0];
    return `${groupsOf(node, at.get(name)).at(-1)?.key ?? ""} ${became.get(name).join(" ")}`;
  });
  const together = new Map();
  for (const names of groups.values()) {
    const nodes = names.map((name) => before.byName.get(name));
    for (const name of names) together.set(name, nodes);
  }
  return together;
}

function emptyScene(id, graph, diff) {
  const root = newGroup("", "", "", null);
  return { id, graph, diff, items: new Map(), root, edges: [], groups: new Map([["", root]]), depth: 0 };
}

/** @param {Scene} scene @param {Item} item @param {Group} around  what it is in, with the groups of its module */
function addItem(scene, item, place, around = scene.root) {
  groupFor(scene, item, place, around).children.push(item);
  for (const { name } of item.members) scene.items.set(name, item);
}

/** The innermost group of the module of an item. */
function groupFor(scene, item, place, around) {
  let parent = around;
  for (const { key, title, path } of groupsOf(item.node, place)) parent = groupIn(scene, parent, `${around.key}${key}`, title, path);
  return parent;
}

function groupIn(scene, parent, key, title, path) {
  let group = scene.groups.get(key);
  if (!group) {
    group = newGroup(key, title, path, parent);
    scene.groups.set(key, group);
    parent.children.push(group);
  }
  return group;
}

/** A region, as a group that looks like its box until it is opened. @param {Inside} inside */
function addRegion(scene, item, place, { at, nodes }) {
  const group = groupIn(scene, groupFor(scene, item, place, scene.root), `region ${item.name} `, regionTitle(item.node), "");
  const places = placesIn(at);
  for (const node of nodes) addItem(scene, new Item([node], null), places.get(node.name), group);
  item.made = { ...plainBox(item.node), tag: "" }; // where the + is
  scene.items.set(item.name, Object.assign(item, { inside: group }));
  group.item = item;
}

function addEdges(scene, to, inputs, pen) {
  for (const name of inputs.length > 1 ? new Set(inputs) : inputs) {
    const from = scene.items.get(name);
    if (from && from !== to) scene.edges.push({ from, to, pen });
  }
}

/** Groups of one child are left out, the others counted; titles are made relative to the group around. */
function finished(scene) {
  const dissolve = (group) => {
    group.children = group.children.map((child) => (isGroupOf(child) ? dissolve(child) : child));
    if (group.parent && group.children.length === 1 && !group.item) {
      scene.groups.delete(group.key);
      return group.children[0];
    }
    return group;
  };
  const settle = (group, depth) => {
    group.depth = depth;
    if (!isInRegion(group)) scene.depth = Math.max(scene.depth, depth);
    for (const [at, child] of group.children.entries()) {
      child.parent = group;
      child.at = at;
      if (isGroupOf(child)) {
        settle(child, depth + 1);
        for (const [kind, n] of child.kinds) group.kinds.set(kind, (group.kinds.get(kind) ?? 0) + n);
        for (const change in group.marks) group.marks[change] += child.marks[change];
        group.count += child.count;
      } else {
        group.count += child.members.length;
        for (const { kind } of child.members) group.kinds.set(kind, (group.kinds.get(kind) ?? 0) + 1);
        if (child.mark) group.marks[child.mark] += child.members.length;
      }
    }
    if (group.item) {
      const { node, box } = Object.assign(group.item, { parent: group.parent });
      Object.assign(group, { count: 1, kinds: new Map([[node.kind, 1]]), box });
      return;
    }
    let around = group.parent;
    while (around && !around.path) around = around.parent;
    if (around && group.path && group.title.startsWith(around.path + ".")) group.title = group.title.slice(around.path.length + 1);
    group.box = groupBox(group.title, group.count, group.marks);
  };
  dissolve(scene.root);
  settle(scene.root, 0);
  return scene;
}

// ---- which groups are open

const MOST_BOXES = 150; // at first

/** Which groups are open: as the user said, else by depth; `version` counts the changes. */
const opened = { depth: 0, said: new Map(), version: 0 };

function setOpen(group, open) {
  opened.said.set(group.key, open);
  opened.version++;
}

function openToDepth(depth) {
  opened.said.clear();
  opened.depth = depth;
  opened.version++;
}

const isOpen = (group) => group.parent === null || (opened.said.get(group.key) ?? (!group.item && group.depth <= opened.depth));

/** The depth to which a scene can be opened without showing more than `most` boxes; infinite where all fits.
 * @param {Scene} scene */
function fittingDepth(scene, most = MOST_BOXES) {
  for (let depth = 0; depth <= scene.depth; depth++) {
    let boxes = 0;
    for (const group of scene.groups.values())
      if (group.depth <= depth && !isInRegion(group))
        boxes += group.children.filter((child) => !isGroupOf(child) || child.item || child.depth > depth).length;
    if (boxes > most) return Math.max(0, depth - 1);
  }
  return Infinity;
}

/** Whether a group is a region, or inside of one. @param {Group|null} group */
const isInRegion = (group) => Boolean(group) && (Boolean(group.item) || isInRegion(group.parent));

/** Open every group around an item; whether one was closed. */
function reveal(item) {
  let closed = false;
  for (let group = item.parent; group.parent; group = group.parent) {
    if (isOpen(group)) continue;
    closed = true;
    setOpen(group, true);
  }
  return closed;
}

/** What stands for an item on the screen: itself, or the outermost closed group around it. */
function shown(item) {
  let found = item.inside ?? item;
  for (let group = item.parent; group.parent; group = group.parent) if (!isOpen(group)) found = group;
  return found;
}
