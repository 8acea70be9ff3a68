// What is wrong with how a page looks: texts that overlap, that leave the page, or that have too little contrast.
() => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const over = (colour, ground) => {
    pen.fillStyle = `rgb(${ground})`;
    pen.fillRect(0, 0, 1, 1);
    pen.fillStyle = colour; // of any notation; what is transparent shows the ground
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  };
  const ground = (element) =>
    element ? over(getComputedStyle(element).backgroundColor, ground(element.parentElement)) : [255, 255, 255];
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };

  const wrong = [];
  if (document.documentElement.scrollWidth > innerWidth) wrong.push("the page is wider than the window");
  const boxes = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT, (node) =>
    node.data.trim() ? NodeFilter.FILTER_ACCEPT : NodeFilter.FILTER_SKIP);
  while (texts.nextNode()) {
    const node = texts.currentNode, element = node.parentElement, style = getComputedStyle(element);
    if (!element.checkVisibility()) continue; // of a closed list
    const range = document.createRange();
    range.selectNodeContents(node);
    const scroller = element.closest(".scroll")?.getBoundingClientRect();
    for (const box of element.closest("svg") ? [element.getBoundingClientRect()] : range.getClientRects()) {
      if (scroller && box.right > scroller.right) continue; // to be scrolled to
      boxes.push({ text: node.data.trim(), box });
      if (box.left < 0 || box.right > innerWidth + 1) wrong.push(`"${node.data}" leaves the page`);
    }
    const behind = ground(element), colour = element.closest("svg") ? style.fill : style.color;
    const found = contrast(over(colour, behind), behind);
    if (found < 4.5) wrong.push(`"${node.data.trim()}" has a contrast of ${found.toFixed(2)}`);
  }
  const inside = 2; // px that two boxes of letters share where their letters do not
  boxes.forEach((one, i) => {
    for (const other of boxes.slice(i + 1)) {
      const a = one.box, b = other.box;
      const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (x > inside && y > inside + 1) wrong.push(`"${one.text}" and "${other.text}" overlap`);
    }
  });
  return { wrong, texts: boxes.length, ground: light(ground(document.body)) };
}
