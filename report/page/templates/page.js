// Filters, order, search and keys of the gallery. The cards are in the HTML: this only hides, sorts and focuses them.
"use strict";
(() => {
  const gallery = document.getElementById("gallery");
  if (!gallery) return;
  const find = (id) => document.getElementById(id);
  const [bar, sort, search, count, help, source] = ["bar", "sort", "search", "count", "keys", "source"].map(find);
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
    button.disabled = n === 0;
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
    else if (event.key === "t") source.checked = !source.checked;
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
