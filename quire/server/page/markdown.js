// Markdown to DOM nodes. Text only ever becomes text nodes: whatever a model writes, no HTML of it is interpreted.

const FENCE = /^ {0,3}(`{3,}|~{3,}) {0,3}([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const SAFE_LINK = /^(https?:|mailto:)/i;
const MAX_INLINE = 4000;
const MAX_DEPTH = 6;
const INLINE = /(`{1,3})([^`]|[^`].*?[^`])\1(?!`)|\*\*(?=\S)(.+?)\*\*|__(?=\S)(.+?)__|~~(?=\S)(.+?)~~|\*(?=\S)([^*]+?)\*|(?<!\w)_(?=\S)([^_]+?)_(?!\w)|!?\[([^\]]{0,300})\]\(<?([^\s<>)]{1,500})>?(?: "[^"]{0,200}")?\)|(https?:\/\/[^\s<>()]{0,499}[^\s<>().,;:!?'"])|\\([\\`*_{}[\]()#+.!|~>-])/s;

// Fills `container`, keeping the nodes of blocks that have not changed since the last call. Depth and length are
// bounded, so that no text can hold up the page.
export function renderMarkdown(container, text, depth = 0) {
  const blocks = split(text);
  const before = container.quireBlocks ?? [];
  let same = 0;
  while (same < blocks.length && same < before.length && blocks[same] === before[same]) same += 1;
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const block of blocks.slice(same)) container.append(blockNode(block.split("\n"), depth));
  container.quireBlocks = blocks;
}

// The source of each block: a fence with all it holds, a list, a quote, a table, or a paragraph.
function split(text) {
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  const blocks = [];
  for (let i = 0; i < lines.length;) {
    if (!lines[i].trim()) { i += 1; continue; }
    const end = endOfBlock(lines, i);
    blocks.push(lines.slice(i, end).join("\n"));
    i = end;
  }
  return blocks;
}

function endOfBlock(lines, start) {
  const fence = FENCE.exec(lines[start]);
  let i = start + 1;
  if (fence) {
    const close = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
    while (i < lines.length && !close.test(lines[i])) i += 1;
    return Math.min(lines.length, i + 1);
  }
  if (HEADING.test(lines[start]) || RULE.test(lines[start])) return i;
  if (ITEM.test(lines[start])) {
    while (i < lines.length && (ITEM.test(lines[i]) || /^\s{2,}\S/.test(lines[i])
        || (!lines[i].trim() && i + 1 < lines.length && (ITEM.test(lines[i + 1]) || /^\s{2,}\S/.test(lines[i + 1]))))) i += 1;
    return i;
  }
  while (i < lines.length && lines[i].trim() && !FENCE.test(lines[i]) && !HEADING.test(lines[i])
      && !(ITEM.test(lines[i]) && !lines[start].startsWith(">"))) i += 1;
  return i;
}

function blockNode(lines, depth) {
  const first = lines[0];
  if (depth > MAX_DEPTH) return element("p", plain(lines.join("\n")));
  const fence = FENCE.exec(first);
  if (fence) return codeBlock(lines, fence);
  const heading = HEADING.exec(first);
  if (heading) return element(`h${heading[1].length}`, inline(heading[2].trim().replace(/ #{1,6}$/, "")));
  if (RULE.test(first)) return document.createElement("hr");
  if (ITEM.test(first)) return list(lines, depth);
  if (first.startsWith(">")) {
    const quote = document.createElement("blockquote");
    renderMarkdown(quote, lines.map((line) => line.replace(/^ {0,3}> ?/, "")).join("\n"), depth + 1);
    return quote;
  }
  if (lines.length > 1 && first.includes("|") && TABLE_RULE.test(lines[1])) return table(lines);
  return element("p", inline(lines.join("\n")));
}

function codeBlock(lines, fence) {
  const closed = lines.length > 1 && lines.at(-1).trim().startsWith(fence[1]);
  const code = element("code", [document.createTextNode(lines.slice(1, closed ? -1 : undefined).join("\n"))]);
  if (fence[2]) code.dataset.language = fence[2];
  const copy = element("button", [document.createTextNode("Copy")]);
  copy.type = "button";
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Not allowed";
    }
  });
  return element("pre", [code, copy]);
}

function list(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const ordered = /\d/.test(mark);
  const node = document.createElement(ordered ? "ol" : "ul");
  if (ordered) node.start = parseInt(mark, 10);
  let item = null;
  const flush = () => {
    if (!item) return;
    const li = document.createElement("li");
    renderMarkdown(li, item.join("\n"), depth + 1);
    // A plain item is no paragraph.
    if (li.firstElementChild?.tagName === "P") li.firstElementChild.replaceWith(...li.firstElementChild.childNodes);
    node.append(li);
  };
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent.length) {
      flush();
      item = [found[3]];
    } else {
      item?.push(line.replace(/^(\t|\s{1,4})/, ""));
    }
  }
  flush();
  return node;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());
  const row = (line, kind) => element("tr", cells(line).map((cell) => element(kind, inline(cell))));
  return element("table", [element("thead", [row(lines[0], "th")]),
    element("tbody", lines.slice(2).map((line) => row(line, "td")))]);
}

function inline(whole) {
  const nodes = [];
  for (let rest = whole.slice(0, MAX_INLINE); rest;) {
    const found = INLINE.exec(rest);
    if (!found) { nodes.push(...plain(rest)); break; }
    if (found.index) nodes.push(...plain(rest.slice(0, found.index)));
    nodes.push(inlineNode(found));
    rest = rest.slice(found.index + found[0].length);
  }
  if (whole.length > MAX_INLINE) nodes.push(...plain(whole.slice(MAX_INLINE)));
  return nodes;
}

function inlineNode([all, ticks, code, strong, strong2, struck, em, em2, label, address, bare, escaped]) {
  if (ticks) return element("code", [document.createTextNode(code)]);
  if (strong ?? strong2) return element("strong", inline(strong ?? strong2));
  if (struck) return element("s", inline(struck));
  if (em ?? em2) return element("em", inline(em ?? em2));
  if (escaped) return document.createTextNode(escaped);
  const target = address ?? bare;
  if (!SAFE_LINK.test(target)) return document.createTextNode(all);
  const link = element("a", bare ? [document.createTextNode(target)] : inline(label || target));
  link.href = target;
  link.rel = "noopener noreferrer nofollow";
  link.target = "_blank";
  return link;
}

function plain(text) {
  const lines = text.split("\n");
  return lines.flatMap((line, i) => i ? [document.createElement("br"), document.createTextNode(line)]
    : [document.createTextNode(line)]);
}

function element(name, children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}
