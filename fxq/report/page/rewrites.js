/* Below the timeline: the rewrites of the chosen pass, each on its own, by rule; and the rules that almost matched. */

const PAGE = 60; // rows of a rule that are shown at once

/** The nodes that a rewrite is about, by the side that they are on. A rule may name a node that was renamed later to one
 * that it replaced, and constants, which are drawn in their readers. */
function namesOf(i, rewrite) {
  const [old, now] = [i > 0 ? graphOf(i - 1) : null, graphOf(i)];
  const before = old ? rewrite.before.flatMap((name) => drawnNames(old, name)) : [];
  const after = rewrite.after.flatMap((name) => drawnNames(now, name));
  const kept = rewrite.before.flatMap((name) => drawnNames(now, name));
  return { before: [...new Set(before)], after: [...new Set(after.length ? after : kept)] };
}

/** `a + b → c` of a rewrite of pass `i`. A reader goes before what it reads, so the nodes that went are recorded last first. */
function rewriteText(i, rewrite) {
  const [before, after] = [inOrder(i - 1, rewrite.before), inOrder(i, rewrite.after)];
  const side = (names) => (names.length > 4 ? `${names.slice(0, 4).join(" + ")} + ${names.length - 4} more` : names.join(" + "));
  if (!before.length) return `+ ${side(after)}`;
  return after.length ? `${side(before)} → ${side(after)}` : `− ${side(before)}`;
}

/** @param {HTMLElement} host */
function makeRewrites(host) {
  const title = el("h2", "Rewrites");
  const body = el("div.rewrites", { id: "rewrites" });
  host.append(title, body);
  let shownPass = -1;
  let rows = new Map(); // of the rewrites that are in the list, by number
  let lists = [];

  const show = () => {
    const i = chosenPass();
    if (i !== shownPass) fill(i);
    const chosen = state.rw === undefined ? -1 : Number(state.rw);
    for (const list of lists) list.openTo((rewrite) => rewrite.number === chosen);
    for (const [number, row] of rows) row.setAttribute("aria-current", String(number === chosen));
    rows.get(chosen)?.scrollIntoView({ block: "nearest" });
  };

  function fill(i) {
    shownPass = i;
    rows = new Map();
    const { rewrites, near = [] } = passes[i];
    title.textContent = rewrites.length ? `Rewrites · ${rewrites.length}` : "Rewrites";
    const numbered = rewrites.map((rewrite, number) => ({ ...rewrite, number }));
    const row = (rewrite) => {
      const { number } = rewrite;
      const about = { "data-rewrite": number, "aria-current": String(state.rw === String(number)), onclick: () => go({ rw: number }) };
      rows.set(number, el("button", about, rewriteText(i, rewrite)));
      return rows.get(number);
    };
    lists = ruleLists(numbered, row, (rule) => ({ "data-rule": rule }));
    if (lists.length === 1) lists[0].element.open = true;
    body.replaceChildren(...lists.map((list) => list.element));
    if (!rewrites.length) body.append(el("p.none", i ? "This pass changed nothing." : "The graph as it was traced."));
    if (near.length) {
      const miss = ({ node, matched, of, reason }) =>
        el("button", { onclick: () => chooseIn(i, node) }, el("b", node), ` ${matched} of ${of} · `, el("span.why", reason));
      const found = ruleLists(near, miss).map((list) => list.element);
      body.append(el("section.near", { id: "near" }, el("h2", `Almost matched · ${near.length}`), ...found));
    }
  }
  return { show };
}

/** What rules did, or almost did, by rule: its name, count and source line; a row for each when it is opened, a page at a
 * time. */
const ruleLists = (all, row, attributes = (rule) => ({})) =>
  d3.groups(all, ({ rule, source }) => `${rule} ${source}`).map(([, members]) => ruleList(members, row, attributes(members[0].rule)));

function ruleList(members, row, attributes) {
  const { rule, source } = members[0];
  const list = el("ol");
  const more = el("button.more", { onclick: () => extend(list.children.length + PAGE) });
  const element = el(
    "details.rule",
    { ...attributes, ontoggle: () => element.open && extend(PAGE) },
    el("summary", el("b", rule), el("span.count", `${members.length}×`), el("span.source", source)),
    list,
    more,
  );
  const extend = (to) => {
    list.append(...members.slice(list.children.length, to).map((member) => el("li", row(member))));
    more.hidden = list.children.length === members.length;
    more.textContent = `${members.length - list.children.length} more`;
  };
  /** Open it so far that the wanted row is there, if it is one of its own. */
  const openTo = (isWanted) => {
    const place = members.findIndex(isWanted);
    if (place < 0) return;
    element.open = true;
    extend(Math.ceil((place + 1) / PAGE) * PAGE);
  };
  return { element, openTo };
}

/** Choose a node that a near miss names: it stood in the graph before, and may have been rewritten by another rule. */
function chooseIn(i, name) {
  const now = drawnNames(graphOf(i), name)[0];
  if (now) go({ node: now, rw: "" });
  else go({ node: (i > 0 && drawnNames(graphOf(i - 1), name)[0]) || "", rw: "", mode: state.mode === "side" ? "side" : "diff" });
}

/** The next (1) or previous (-1) rewrite of the pass. */
function stepRewrite(way) {
  const { rewrites } = passes[chosenPass()];
  if (!rewrites.length) return;
  const now = state.rw === undefined ? (way > 0 ? -1 : rewrites.length) : Number(state.rw);
  go({ rw: Math.max(0, Math.min(rewrites.length - 1, now + way)) });
}
