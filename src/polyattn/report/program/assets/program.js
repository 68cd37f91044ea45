'use strict';
// Sorting and filtering of the table of problems; without this script it is whole and in order.
(() => {
  const table = document.querySelector('#problems table');
  if (!table) return;
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const rows = [...body.rows];

  const key = (row, at) => {
    const cell = row.cells[at];
    return 'value' in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
  };
  const compare = (a, b) => (typeof a === 'number' && typeof b === 'number')
    ? a - b
    : String(a).localeCompare(String(b));

  const sort = (at) => {
    const down = heads[at].getAttribute('aria-sort') !== 'descending';
    for (const head of heads) head.removeAttribute('aria-sort');
    heads[at].setAttribute('aria-sort', down ? 'descending' : 'ascending');
    const known = rows.filter((row) => key(row, at) !== '');
    const unknown = rows.filter((row) => key(row, at) === '');  // what has no value is last
    known.sort((a, b) => (down ? -1 : 1) * compare(key(a, at), key(b, at)));
    body.append(...known, ...unknown);
  };
  heads.forEach((head, at) => {
    const button = document.createElement('button');
    button.textContent = head.textContent;
    button.addEventListener('click', () => sort(at));
    head.replaceChildren(button);
  });

  const filter = document.createElement('input');
  filter.id = 'filter';
  filter.type = 'search';
  filter.placeholder = 'filter: words, as causal float32';
  filter.setAttribute('aria-label', 'filter the problems');
  filter.addEventListener('input', () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.classList.toggle('hidden', !words.every((word) => text.includes(word)));
    }
  });
  table.parentElement.before(filter);
  document.documentElement.className = 'js';
})();
