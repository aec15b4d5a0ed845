// Curves: the values at the pointer's step, and other x axes. The lines are in the HTML, with x = step / last step.
"use strict";
(() => {
  const curves = document.querySelector(".curves");
  if (!curves) return;
  const rows = JSON.parse(curves.dataset.rows); // step, tokens and seconds of each row
  const steps = rows.map((row) => row[0]);
  const last = Math.max(1, steps.at(-1));
  const axis = document.querySelector(".axis");
  const select = axis.querySelector("select");
  let positions = steps; // of each row on the chosen axis

  // Return the x of a step on the chosen axis, from 0 to 1
  function place(step) {
    if (positions === steps || steps.length < 2) return step / last;
    const next = Math.max(1, steps.findIndex((x) => x >= step));
    const part = (step - steps[next - 1]) / (steps[next] - steps[next - 1]);
    return (positions[next - 1] + part * (positions[next] - positions[next - 1])) / positions.at(-1);
  }

  // Return round numbers from 0 to `end`, as axis_ticks in plots.py
  function ticks(end) {
    const power = 10 ** Math.floor(Math.log10(end / 2));
    const size = power * (end > 10 * power ? 5 : end > 5 * power ? 2 : 1);
    return Array.from({ length: Math.floor(end / size + 1e-6) + 1 }, (_, i) => i * size);
  }

  const lines = [...curves.querySelectorAll("polyline, polygon")].map((line) => [
    line,
    line.getAttribute("points").split(" ").map((point) => point.split(",")),
  ]);
  const labels = [...curves.querySelectorAll("svg .x")].map((group) => [group, [...group.children]]);

  function draw() {
    const column = select.selectedIndex;
    let sum = 0;
    positions = column ? rows.map((row) => (sum += (row[column] ?? 0) / (column === 2 ? 60 : 1))) : steps;
    for (const [line, points] of lines) {
      line.setAttribute("points", points.map(([x, y]) => `${place(x * last).toFixed(4)},${y}`).join(" "));
    }
    for (const [group, texts] of labels) {
      const other = column ? ticks(sum) : [];
      const added = other.map((value) => {
        const text = texts[0].cloneNode();
        text.setAttribute("x", (400 * value) / sum);
        text.textContent = value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
        return text;
      });
      group.replaceChildren(...(column ? added : texts));
    }
  }

  for (const figure of curves.querySelectorAll("figure")) {
    const [svg, output, cursor] = ["svg", "output", ".cursor"].map((name) => figure.querySelector(name));
    const shown = [...figure.querySelectorAll(".legend li")].map((item) => {
      const b = item.querySelector("b");
      return { b, newest: b.textContent, steps: JSON.parse(item.dataset.steps), values: JSON.parse(item.dataset.values) };
    });
    const all = shown.flatMap((line) => line.steps);
    const nearest = (steps, x) =>
      steps.reduce((best, step) => (Math.abs(place(step) - x) < Math.abs(place(best) - x) ? step : best));
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const step = nearest(all, (((event.clientX - box.left) / box.width) * 452 - 44) / 400);
      output.value = `step ${Math.round(step)}`;
      cursor.setAttribute("transform", `translate(${400 * place(step)})`);
      cursor.setAttribute("visibility", "visible");
      for (const { b, steps, values } of shown) {
        const own = nearest(steps, place(step));
        b.textContent = values[steps.indexOf(own)] + (own === step ? "" : ` (step ${Math.round(own)})`);
      }
    });
    svg.addEventListener("pointerleave", () => {
      output.value = "";
      cursor.setAttribute("visibility", "hidden");
      for (const { b, newest } of shown) b.textContent = newest;
    });
  }
  for (const column of [1, 2]) select.options[column].disabled = !rows.some((row) => row[column] > 0);
  select.addEventListener("change", draw);
  axis.hidden = false;
})();

// Filters, order, search and keys of the gallery. The cards are in the HTML: this only hides, sorts and focuses them.
(() => {
  const gallery = document.getElementById("gallery");
  if (!gallery) return;
  const find = (id) => document.getElementById(id);
  const [bar, sort, search, count, help] = ["bar", "sort", "search", "count", "keys"].map(find);
  const cards = [...gallery.children];
  const inOrder = new Map(cards.map((card, i) => [card, i]));
  const buttons = [...bar.querySelectorAll("[data-show]")];
  const selects = [...bar.querySelectorAll("[data-group]")];
  const links = [...document.querySelectorAll(".pages a")];
  const others = JSON.parse(gallery.dataset.others ?? "{}"); // facts of prompts on other pages, which the filters count
  const passes = (facts, show) => show === "all" || (facts.is ?? "").split(" ").includes(show);
  const by = {
    order: (a, b) => inOrder.get(a) - inOrder.get(b),
    tokens: (a, b) => b.dataset.tokens - a.dataset.tokens,
    reward: (a, b) => (a.dataset.reward ?? Infinity) - (b.dataset.reward ?? Infinity),
    spread: (a, b) => (b.dataset.spread ?? -1) - (a.dataset.spread ?? -1),
  };
  const texts = new Map(); // card -> its text in lower case, added when it is searched
  let show = "all";
  let sorted = "order";
  let visible = cards;
  let current = null;

  const textOf = (card) => {
    if (!texts.has(card)) texts.set(card, card.textContent.toLowerCase());
    return texts.get(card);
  };

  function update() {
    const words = search.value.trim().toLowerCase();
    const chosen = selects.filter((select) => select.value !== "");
    const passesAll = (facts) =>
      passes(facts, show) && chosen.every((select) => facts[select.dataset.group] === select.value);
    const matches = (card) => passesAll(card.dataset) && (!words || textOf(card).includes(words));
    if (sorted !== sort.value) {
      sorted = sort.value;
      const order = [...cards].sort((a, b) => by[sorted](a, b) || by.order(a, b));
      gallery.append(...order);
    }
    visible = [...gallery.children].filter((card) => {
      card.hidden = !matches(card);
      return !card.hidden;
    });
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.show === show));
    count.value = `${visible.length.toLocaleString("en")} of ${cards.length.toLocaleString("en")}`;
    const filtered = show !== "all" || chosen.length > 0;
    for (const link of links) {
      const n = others[link.dataset.page].filter(passesAll).length;
      link.querySelector(".count").textContent = filtered && !words ? ` (${n.toLocaleString("en")})` : "";
      link.hash = state();
    }
  }

  // The address contains the filters, so that a view can be linked and links to other pages keep it
  function state() {
    const params = new URLSearchParams();
    if (show !== "all") params.set("show", show);
    for (const select of selects) if (select.value) params.set(select.name, select.value);
    if (sort.value !== "order") params.set("sort", sort.value);
    if (search.value.trim()) params.set("q", search.value.trim());
    return params.toString();
  }

  const write = () => history.replaceState(null, "", `#${state()}`);

  function read() {
    const hash = location.hash.slice(1);
    const target = /^p\d+$/.test(hash) && find(hash);
    if (target) {
      if (target.hidden) reset();
      focus(target);
      return;
    }
    const params = new URLSearchParams(hash);
    const filter = params.get("show");
    show = buttons.some((button) => button.dataset.show === filter) ? filter : "all";
    for (const select of selects) select.value = params.get(select.name) ?? "";
    for (const select of selects) if (select.selectedIndex < 0) select.value = "";
    sort.value = Object.hasOwn(by, params.get("sort") ?? "") ? params.get("sort") : "order";
    search.value = params.get("q") ?? "";
    update();
    if (params.size) bar.scrollIntoView({ block: "start" });
  }

  function reset() {
    show = "all";
    for (const select of selects) select.value = "";
    search.value = "";
    update();
  }

  function choose(name) {
    const button = buttons.find((button) => button.dataset.show === name);
    if (button.disabled) return;
    show = name;
    update();
    write();
  }

  function focus(card) {
    current?.removeAttribute("aria-current");
    current = card;
    card.setAttribute("aria-current", "true");
    card.focus({ preventScroll: true });
    card.scrollIntoView({ block: "start" });
  }

  // Focus the card after or before the focused one, or if there is none, the card at the top of the window
  function step(direction) {
    const focused = document.activeElement.closest(".card") ?? current;
    let index = visible.indexOf(focused);
    if (index < 0) {
      const top = bar.getBoundingClientRect().bottom;
      index = visible.findIndex((card) => card.getBoundingClientRect().bottom > top) - (direction > 0 ? 1 : 0);
    }
    const next = visible[Math.min(Math.max(index + direction, 0), visible.length - 1)];
    if (next) focus(next);
  }

  for (const button of buttons) {
    const all = [...cards.map((card) => card.dataset), ...Object.values(others).flat()];
    const n = all.filter((facts) => passes(facts, button.dataset.show)).length;
    button.querySelector(".count").textContent = n.toLocaleString("en");
    button.hidden = button.disabled = n === 0;
    button.addEventListener("click", () => choose(button.dataset.show));
  }
  const changed = () => (update(), write());
  for (const select of [...selects, sort]) select.addEventListener("change", changed);
  let typing = 0;
  search.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(changed, 150);
  });
  bar.addEventListener("submit", (event) => event.preventDefault());
  find("help").addEventListener("click", () => help.showModal());
  addEventListener("hashchange", read);

  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
    const field = event.target.closest("input, select, textarea");
    if (field === search && event.key === "Escape") {
      event.preventDefault(); // the browser would clear the field
      return search.blur();
    }
    if (field) return;
    const button = buttons.find((button) => button.dataset.key === event.key);
    if (button) choose(button.dataset.show);
    else if (event.key === "j") step(1);
    else if (event.key === "k") step(-1);
    else if (event.key === "?") help.showModal();
    else if (event.key === "/") search.focus(), search.select();
    else if (event.key === "s") {
      sort.selectedIndex = (sort.selectedIndex + 1) % sort.options.length;
      changed();
    } else if (event.key === "o" || (event.key === "Enter" && event.target === current)) {
      (document.activeElement.closest(".card") ?? current)?.querySelector("a.full")?.click();
    } else return;
    event.preventDefault();
  });

  bar.hidden = false;
  read();
})();
