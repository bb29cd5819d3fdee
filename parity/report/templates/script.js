"use strict";
(() => {
  const rows = [...document.querySelectorAll("#check-table tbody tr")];
  const text = document.getElementById("filter-text");
  const boxes = [...document.querySelectorAll('.filters input[name="status"]')];
  const count = document.getElementById("filter-count");
  const apply = () => {
    const wanted = text.value.trim().toLowerCase();
    const statuses = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
    let shown = 0;
    for (const row of rows) {
      const visible = statuses.has(row.dataset.status) && row.textContent.toLowerCase().includes(wanted);
      row.hidden = !visible;
      shown += visible ? 1 : 0;
    }
    count.textContent = `${shown} of ${rows.length} checks`;
  };
  if (text) {
    text.addEventListener("input", apply);
    boxes.forEach((box) => box.addEventListener("change", apply));
    text.form.addEventListener("submit", (event) => event.preventDefault());
    apply();
  }
  // A printed page cannot be unfolded.
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((each) => { each.open = true; });
  });
})();
