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
  const title = el("h2", {}, "Rewrites");
  const body = el("div.rewrites", { id: "rewrites" });
  host.append(title, body);
  let shownPass = -1;
  let rows = new Map(); // of the rewrites that are in the list
  let openTo = null;

  const show = () => {
    const i = chosenPass();
    if (i !== shownPass) fill(i);
    const chosen = state.rw === undefined ? -1 : Number(state.rw);
    if (chosen >= 0) openTo?.(chosen);
    for (const [number, row] of rows) row.setAttribute("aria-current", String(number === chosen));
    rows.get(chosen)?.scrollIntoView({ block: "nearest" });
  };

  function fill(i) {
    shownPass = i;
    rows = new Map();
    const { rewrites, near = [] } = passes[i];
    title.textContent = rewrites.length ? `Rewrites · ${rewrites.length}` : "Rewrites";
    const groups = d3.groups(
      rewrites.map((rewrite, number) => ({ rewrite, number })),
      ({ rewrite }) => `${rewrite.rule} ${rewrite.source}`,
    );
    const lists = groups.map(([, members]) => ruleList(i, members, rows));
    openTo = (number) => lists.find((list) => list.has(number))?.openTo(number);
    if (lists.length === 1) lists[0].open();
    body.replaceChildren(...lists.map((list) => list.element));
    if (!rewrites.length) body.append(el("p.none", {}, i ? "This pass changed nothing." : "The graph as it was traced."));
    if (near.length) body.append(nearMisses(i, near));
  }
  return { show };
}

/** The rewrites of pass `i` by one rule: its name, count and source line; the rewrites when it is opened, a page at a time. */
function ruleList(i, members, rows) {
  const { rule, source } = members[0].rewrite;
  const placeOf = (number) => d3.bisector((member) => member.number).left(members, number);
  const list = el("ol");
  const more = el("button.more", { type: "button", onclick: () => extend(list.children.length + PAGE) });
  const element = el(
    "details.rule",
    { "data-rule": rule, ontoggle: () => element.open && extend(PAGE) },
    el("summary", {}, el("b", {}, rule), el("span.count", {}, `${members.length}×`), el("span.source", {}, source)),
    list,
    more,
  );
  const extend = (to) => {
    for (const { rewrite, number } of members.slice(list.children.length, to)) {
      const row = el(
        "button",
        { type: "button", "data-rewrite": number, "aria-current": String(state.rw === String(number)), onclick: () => go({ rw: number }) },
        rewriteText(i, rewrite),
      );
      rows.set(number, row);
      list.append(el("li", {}, row));
    }
    const left = members.length - list.children.length;
    more.hidden = left <= 0;
    more.textContent = `${left} more`;
  };
  return {
    element,
    has: (number) => members[placeOf(number)]?.number === number,
    open: () => (element.open = true),
    openTo(number) {
      element.open = true;
      if (placeOf(number) >= list.children.length) extend(Math.ceil((placeOf(number) + 1) / PAGE) * PAGE);
    },
  };
}

/** Rules that matched in part: where, how far, and what stopped them. */
function nearMisses(i, near) {
  const section = el("section.near", { id: "near" }, el("h2", {}, `Almost matched · ${near.length}`));
  for (const [, members] of d3.groups(near, (miss) => `${miss.rule} ${miss.source}`)) {
    const list = el("ol");
    const more = el("button.more", { type: "button", onclick: () => extend() });
    const extend = () => {
      for (const miss of members.slice(list.children.length, list.children.length + PAGE)) {
        list.append(
          el(
            "li",
            {},
            el(
              "button",
              { type: "button", onclick: () => chooseIn(i, miss.node) },
              el("b", {}, miss.node),
              ` ${miss.matched} of ${miss.of} · `,
              el("span.why", {}, miss.reason),
            ),
          ),
        );
      }
      more.hidden = list.children.length >= members.length;
      more.textContent = `${members.length - list.children.length} more`;
    };
    const element = el(
      "details.rule",
      { ontoggle: () => element.open && !list.children.length && extend() },
      el("summary", {}, el("b", {}, members[0].rule), el("span.count", {}, `${members.length}×`), el("span.source", {}, members[0].source)),
      list,
      more,
    );
    section.append(element);
  }
  return section;
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
