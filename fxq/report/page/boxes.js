/* How large what is written in the box of a node makes it. The lines are those of `fxq/picture/graph_picture.py`. */

const HEAD = { size: 13, weight: "bold", height: 24 };
const LINE = { height: 15, sizes: { name: 10, value: 11.5, scale: 11, detail: 10, warn: 10, change: 10.5 } };
const WIDEST = 38; // characters in a line
const STRIP = 16; // height of the strip that says how a node changed
const FONT = '"Helvetica Neue", Helvetica, Arial, "Liberation Sans", sans-serif';

/** `role`: which of `LINE.sizes`, and of the colours of a theme. @typedef {{text: string, role: string}} Line */
/** @typedef {{head: string, tag: string, pill: boolean, lines: readonly Line[], width: number, height: number}} Box */

const fontOf = (size, weight = "") => `${weight ? weight + " " : ""}${size}px ${FONT}`;

const widthAt100 = memo((weight) => {
  const context = document.createElement("canvas").getContext("2d");
  context.font = fontOf(100, weight);
  return memo((character) => context.measureText(character).width);
});

/** Width of a text in world units: a sum over its characters, which is near enough and much faster than measuring. */
const textWidth = (text, size, weight = "") => (d3.sum(text, widthAt100(weight)) * size) / 100;

/** `text` with its middle left out when it is longer than `most` characters, without line breaks. */
function clip(text, most = WIDEST) {
  const plain = text.replace(/[\u0000-\u001f\u007f-\u009f\u2028\u2029]+/g, " ");
  if (plain.length <= most) return plain;
  const tail = Math.floor(most / 3);
  return `${plain.slice(0, most - tail - 1)}…${plain.slice(-tail)}`;
}

/** The box of a node. `mark`: how it changed; `told`: what changed, as lines. @param {NodeRecord} node @returns {Box} */
function boxOf(node, mark, told) {
  const plain = plainBox(node);
  if (!mark) return plain;
  const more = told.map((text) => ({ text: clip(text), role: "change" }));
  const height = plain.height + STRIP + more.length * LINE.height;
  return { ...plain, lines: [...plain.lines, ...more], width: Math.max(plain.width, widthOf(more)), height };
}

/** The same without what changed: passes share it. */
const plainBox = memo((node) => {
  const look = data.looks[node.kind];
  const lines = node.lines.map(([role, text]) => ({ role, text }));
  const head = clip(node.label, 30);
  const tag = look.pill ? "" : look.tag;
  const width = textWidth(head, HEAD.size, HEAD.weight) + (tag ? textWidth(tag, 10) + 14 : 0) + 20;
  const height = HEAD.height + lines.length * LINE.height + (lines.length ? 7 : 2);
  return { head, tag, pill: look.pill, lines, width: Math.max(rounded(width), widthOf(lines)), height };
});

/** Few different widths: groups that are alike then have the same layout, which is made once. */
const rounded = (width) => Math.max(120, Math.ceil(width / 30) * 30);

/** How wide a box must be for its lines. @param {readonly Line[]} lines */
function widthOf(lines) {
  let width = 0;
  for (const { text, role } of lines) width = Math.max(width, textWidth(text, LINE.sizes[role]) + 18);
  return rounded(width);
}

/** How a box of several removed nodes looks: as in `fxq/picture/diff_picture.py`. */
const REPLACED = { tag: "replaced", colour: "#8f8f8f", ink: "#ffffff", pill: false, border: "dashed" };

const MOST_LISTED = 16; // of the nodes in a box; more are counted

/** The box of removed nodes that became the same: a line for each, or for each op. @param {NodeRecord[]} nodes @returns {Box} */
function replacedBox(nodes) {
  const listed = nodes.map((node) => `${node.label}   ${node.name}`);
  const counted = () => [...counts(nodes.map((node) => node.label))].sort((a, b) => b[1] - a[1]).map(([op, count]) => `${count} × ${op}`);
  const lines = (nodes.length > MOST_LISTED ? counted() : listed).map((text) => ({ text: clip(text), role: "detail" }));
  const head = `${nodes.length} nodes`;
  const height = HEAD.height + lines.length * LINE.height + 7 + STRIP;
  return { head, tag: REPLACED.tag, pill: false, lines, width: widthOf(lines), height };
}

/** Which of the nodes of a box stands at a height in it. @param {Item} item */
function memberAt({ members, mark }, y) {
  if (members.length > MOST_LISTED) return members[0];
  const line = Math.floor((y - HEAD.height - (mark ? STRIP : 0) - 3) / LINE.height);
  return members[Math.max(0, Math.min(members.length - 1, line))];
}

/** The box of a collapsed group: its title, how many nodes, and of which kinds. @returns {Box} */
function groupBox(title, count, marks) {
  const text = clip(title, 30);
  const told = Object.entries(marks).filter(([, n]) => n);
  const width = Math.max(textWidth(text, HEAD.size, HEAD.weight) + 64, 170);
  return { head: text, tag: "", pill: false, lines: EMPTY, width: rounded(width), height: 64 + (told.length ? STRIP : 0) };
}
