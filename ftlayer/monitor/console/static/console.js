// Keeps an open page current: swaps the parts that the server sends, and no more. Pages work without it.
"use strict";

(() => {
  const source = document.body.dataset.events;
  const live = document.getElementById("live");
  const waiting = new Map(); // parts that came while somebody was inside them
  let stream = null;

  function say(kind, text) {
    if (live && live.textContent !== text) {
      live.className = `live ${kind}`;
      live.textContent = text;
    }
  }

  // What somebody has opened, checked or scrolled stays so when the part around it is swapped.
  function remember(part) {
    return {
      open: [...part.querySelectorAll("details[id][open]")].map((details) => details.id),
      checked: [...part.querySelectorAll("input[type=checkbox]:checked")].map((box) => [box.name, box.value]),
      scrolled: [...part.querySelectorAll("[data-scroll]")].map((box) => [box.dataset.scroll, box.scrollLeft]),
    };
  }

  function restore(part, state) {
    for (const id of state.open) {
      const details = part.querySelector(`#${CSS.escape(id)}`);
      if (details) details.open = true;
    }
    for (const [name, value] of state.checked) {
      const box = part.querySelector(`input[name="${CSS.escape(name)}"][value="${CSS.escape(value)}"]`);
      if (box) box.checked = true;
    }
    for (const [name, left] of state.scrolled) {
      const box = part.querySelector(`[data-scroll="${CSS.escape(name)}"]`);
      if (box) box.scrollLeft = left;
    }
  }

  // Times come in UTC and are shown as the clock of who looks has them; the foot of the page names its zone.
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";
  const two = (number) => String(number).padStart(2, "0");
  function localize(root) {
    for (const time of root.querySelectorAll("time[datetime]")) {
      if (!/^\d{4}-\d\d-\d\dT/.test(time.dateTime)) continue;
      const at = new Date(time.dateTime);
      const clock = [at.getHours(), at.getMinutes(), at.getSeconds()].map(two).join(":");
      const day = [at.getFullYear(), two(at.getMonth() + 1), two(at.getDate())].join("-");
      time.textContent = "clock" in time.dataset ? clock : `${day} ${clock}`;
      time.title = `${day} ${clock} ${zone} (${time.dateTime})`;
    }
  }

  // On a phone's width a row of a table is a card, and each cell says what its column is. The roles stay a table's.
  const ROLES = { table: "table", thead: "rowgroup", tbody: "rowgroup", tr: "row", td: "cell" };
  function prepare(root) {
    localize(root);
    for (const table of root.querySelectorAll("table")) {
      const headings = [...table.querySelectorAll("thead th")].map((cell) => cell.innerText.trim());
      table.classList.add("stacks");
      for (const element of [table, ...table.querySelectorAll("thead, tbody, tr, td")]) {
        element.setAttribute("role", ROLES[element.localName]);
      }
      for (const cell of table.querySelectorAll("th")) {
        cell.setAttribute("role", cell.closest("thead") ? "columnheader" : "rowheader");
      }
      for (const row of table.querySelectorAll("tbody tr")) {
        [...row.cells].forEach((cell, place) => {
          if (headings[place] && cell.localName === "td" && cell.colSpan === 1) cell.dataset.heading = headings[place];
        });
      }
    }
  }

  function swap(part, html) {
    const state = remember(part);
    const made = document.createElement("template");
    made.innerHTML = html;
    part.replaceChildren(made.content);
    prepare(part);
    part.classList.remove("old");
    restore(part, state);
  }

  // A part that is swapped under a finger loses its scrolling.
  let held = null;
  let letGo = 0;
  function hold(event) {
    held = event.target;
    clearTimeout(letGo);
    if (event.type !== "touchstart") letGo = setTimeout(() => ((held = null), takeWaiting()), 700);
  }
  for (const kind of ["touchstart", "touchend", "touchcancel", "scroll"]) {
    document.addEventListener(kind, hold, { capture: true, passive: true });
  }

  function isBusy(part) {
    if (held && part.contains(held)) return true;
    if (part.contains(document.activeElement)) return true;
    const selected = document.getSelection();
    return !selected.isCollapsed && part.contains(selected.anchorNode);
  }

  function take(id, html) {
    const part = document.getElementById(id);
    if (!part) return;
    if (isBusy(part)) {
      waiting.set(id, html);
      part.classList.add("old");
    } else {
      waiting.delete(id);
      swap(part, html);
    }
  }

  function takeWaiting() {
    for (const [id, html] of [...waiting]) take(id, html);
  }

  function open() {
    if (stream || !source || document.hidden) return;
    stream = new EventSource(source);
    stream.onopen = () => say("on", "live");
    stream.onerror = () => {
      say("off", "no connection");
      // A stream that was refused is not tried again by the browser: the session has ended, or the job is gone.
      if (stream && stream.readyState === EventSource.CLOSED) {
        close();
        setTimeout(open, 5000);
      }
    };
    stream.addEventListener("part", (event) => {
      const { part, html } = JSON.parse(event.data);
      take(part, html);
    });
    stream.addEventListener("over", () => {
      close();
      location.reload();
    });
  }

  function close() {
    if (stream) stream.close();
    stream = null;
  }

  prepare(document);
  const named = document.getElementById("zone");
  if (named) named.textContent = `Times are ${zone}.`;
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  document.addEventListener("focusout", () => setTimeout(takeWaiting));
  document.addEventListener("selectionchange", () => waiting.size && setTimeout(takeWaiting));
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", open);

  // A box above others checks them all.
  document.addEventListener("change", (event) => {
    const name = event.target.dataset && event.target.dataset.all;
    if (!name) return;
    for (const box of document.querySelectorAll(`input[type="checkbox"][name="${CSS.escape(name)}"]`)) {
      box.checked = event.target.checked;
    }
  });

  document.addEventListener("click", (event) => {
    const button = event.target.closest && event.target.closest("button[data-copy]");
    if (!button) return;
    const text = document.getElementById(button.dataset.copy).textContent;
    navigator.clipboard.writeText(text).then(
      () => (button.textContent = "Copied"),
      () => (button.textContent = "Select and copy it"),
    );
  });
})();
