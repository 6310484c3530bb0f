/** Devices over time: what ran, what runs, and what is planned, with deadlines.
 *
 * Canvases lie above each other, and time moves them as they are: only the browser's compositor has work then. What has
 * ended is drawn once; what runs, is planned or has just ended, and the marks, are drawn with each frame of the server. A
 * view of another scale is drawn aside, a millisecond per frame, and shown when it is whole; until then the one before it
 * is stretched. Edges of tiles are at whole pixels, and what would cover no further pixel is not drawn: the browser fills
 * such rectangles in a fraction of the time, which is its main thread's where there is no GPU.
 */

import type { Live } from "./live";
import type { Device, Request, Tile } from "./state";

const STRIP = 20;
const AXIS = 20;
const AHEAD = 0.14;
const LEAST_SPAN_S = 0.05;
const MOST_SPAN_S = 24 * 3600;
const LEAST_LANE = 4;
const MOST_LANE = 26;
const ROOM = 560;
/** How much wider than the view a sheet is, to its right: that of the past, and those that are drawn twice a second. */
const MARGIN = 0.25;
const LEAST_MARGIN = 0.05;
const BUDGET_MS = 0.8;
/** How many ended tiles are drawn with what runs, until those of the past are drawn anew. */
const MOST_NEW = 300;
const CHUNK = 32;

interface Paint {
  card: string;
  ink: string;
  soft: string;
  rule: string;
  lane: string;
  bad: string;
  good: string;
  accent: string;
  load: string;
  font: string;
}

export interface Hit {
  tile: Tile;
  device: Device;
  x: number;
  y: number;
}

/** A canvas that shows time from `left_s` on, at a scale of its own. What is drawn is seen when it is shown.
 *
 * It is drawn out of sight, and given to the canvas as a whole: one that is drawn on would be copied in each frame of the
 * screen, whether it has changed or not.
 */
class Sheet {
  readonly canvas = document.createElement("canvas");
  private readonly seen = this.canvas.getContext("bitmaprenderer")!;
  private readonly drawn = new OffscreenCanvas(1, 1);
  readonly pen = this.drawn.getContext("2d")!;
  left_s = Number.NaN;
  perSecond = 1;
  ratio = 1;
  private width = 0;
  /** By row, up to which pixel tiles were drawn. */
  private covered = new Int32Array(0);

  size(width: number, height: number, ratio: number, numRows: number): void {
    this.width = width;
    this.ratio = ratio;
    this.covered = new Int32Array(numRows);
    this.drawn.width = Math.max(1, Math.round(width * ratio));
    this.drawn.height = Math.max(1, Math.round(height * ratio));
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.left_s = Number.NaN;
  }

  /** Empty it, and let it begin at this time. */
  clear(left_s: number, perSecond: number, font: string): void {
    const { ratio } = this;
    this.left_s = left_s;
    this.perSecond = perSecond;
    this.covered.fill(0);
    this.pen.setTransform(1, 0, 0, 1, 0, 0);
    this.pen.clearRect(0, 0, this.drawn.width, this.drawn.height);
    this.pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.pen.font = `11px ${font}`;
    this.pen.textBaseline = "middle";
  }

  x(time_s: number): number {
    return (time_s - this.left_s) * this.perSecond;
  }

  /** Whole pixels from one time to another, at least one. Null: they are out of sight, or one that was drawn in these rows. */
  span(start_s: number, end_s: number, first: number, last: number): [number, number] | null {
    const { ratio, covered } = this;
    const left = Math.max(0, Math.round(this.x(start_s) * ratio));
    const right = Math.max(left + 1, Math.round(this.x(end_s) * ratio));
    if (this.x(end_s) < 0 || left > this.drawn.width) return null;
    let isNew = right > left + 1;
    for (let row = first; row <= last; row++) {
      isNew ||= covered[row]! < right;
      covered[row] = Math.max(covered[row]!, right);
    }
    return isNew ? [left / ratio, right / ratio] : null;
  }

  /** Let the browser do what was drawn so far, so that `show` has not all of it to do. */
  flush(): void {
    this.pen.getImageData(0, 0, 1, 1);
  }

  /** Show what was drawn since it was cleared. */
  show(): void {
    this.seen.transferFromImageBitmap(this.drawn.transferToImageBitmap());
  }

  /** Move it so that it fits a view. */
  lay(left_s: number, perSecond: number): void {
    if (Number.isNaN(this.left_s)) return;
    const shift = Math.round((this.left_s - left_s) * perSecond * this.ratio) / this.ratio;
    this.canvas.style.transform = `translateX(${shift}px) scaleX(${perSecond / this.perSecond})`;
  }

  get end_s(): number {
    return this.left_s + this.width / this.perSecond;
  }
}

export class Plot {
  /** Seconds from the left edge to the right one. */
  span_s = 30;
  chosen: number | null = null;
  /** Called when the view begins or ends to follow the clock. */
  onChange: () => void = () => undefined;

  /** The time at the right edge of a view that stands still; null: the view follows the clock. */
  private stood_s: number | null = null;
  private hovered: Tile | null = null;
  private paint!: Paint;
  private width = 0;
  private height = 0;
  private ratio = 1;
  private lane = MOST_LANE;
  private devices: Device[] = [];
  private rowOf = new Map<number, number>();

  private readonly lanes = document.createElement("div");
  private readonly window = document.createElement("div");
  private readonly untilNow = document.createElement("div");
  private readonly nowLine = document.createElement("div");
  private readonly frame = document.createElement("div");
  private readonly running = new Sheet();
  private readonly marks = new Sheet();
  /** What has ended: the sheet that is shown, and the one that is drawn aside. `numPast` tiles are on them. */
  private past = new Sheet();
  private aside = new Sheet();
  private numPast = 0;
  private firstPast: Tile | undefined;
  /** The next tile that is drawn aside; null: none is. */
  private nextAside: number | null = null;
  private isStale = true;
  private version = -1;
  private areMarksStale = false;
  private isRunningStale = false;
  /** Where the present time is, in pixels. */
  private now = Number.NaN;

  constructor(
    readonly place: HTMLElement,
    readonly live: Live,
  ) {
    this.window.className = "window";
    this.untilNow.className = "until-now";
    this.nowLine.className = "now-line";
    this.frame.className = "frame";
    this.untilNow.append(this.running.canvas);
    this.aside.canvas.hidden = true;
    this.window.append(this.marks.canvas, this.past.canvas, this.aside.canvas, this.untilNow, this.frame, this.nowLine);
    this.lanes.className = "rows";
    place.append(this.lanes, this.window);
    this.readPaint();
  }

  get isLive(): boolean {
    return this.stood_s === null;
  }

  get gutter(): number {
    return this.width < 560 ? 34 : 92;
  }

  /** Begin to draw, until the returned function is called. */
  run(): () => void {
    const observer = new ResizeObserver(() => this.resize());
    observer.observe(this.place);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    const repaint = (): void => this.readPaint();
    scheme.addEventListener("change", repaint);
    let frame = 0;
    const step = (): void => {
      frame = requestAnimationFrame(step);
      performance.mark("plot-begin");
      this.draw();
      performance.measure("plot", "plot-begin");
      performance.clearMarks("plot-begin");
      performance.clearMeasures("plot");
    };
    this.resize();
    step();
    return () => {
      cancelAnimationFrame(frame);
      observer.disconnect();
      scheme.removeEventListener("change", repaint);
      this.place.replaceChildren();
    };
  }

  // The view.

  private right_s(): number {
    return this.stood_s ?? this.live.now_s() + this.span_s * AHEAD;
  }

  private left_s(): number {
    return this.right_s() - this.span_s;
  }

  private get inner(): number {
    return Math.max(1, this.width - this.gutter);
  }

  private get perSecond(): number {
    return this.inner / this.span_s;
  }

  follow(): void {
    this.stand(null);
  }

  pause(): void {
    this.stand(this.isLive ? this.right_s() : null);
  }

  private stand(at_s: number | null): void {
    const wasLive = this.isLive;
    this.stood_s = at_s;
    if (wasLive !== this.isLive) this.onChange();
  }

  /** Move by a share of the width; the view stands still then. */
  move(share: number): void {
    const ahead_s = this.live.now_s() + this.span_s * AHEAD;
    this.stand(Math.min(ahead_s, this.right_s() + share * this.span_s));
  }

  zoom(factor: number, x = this.width): void {
    const share = Math.min(1, Math.max(0, (x - this.gutter) / this.inner));
    const at_s = this.left_s() + share * this.span_s;
    this.span_s = Math.min(MOST_SPAN_S, Math.max(LEAST_SPAN_S, this.span_s * factor));
    if (!this.isLive) this.stood_s = at_s + (1 - share) * this.span_s;
  }

  choose(number: number | null): void {
    this.chosen = number;
    this.isStale = true;
    this.version = -1;
  }

  hover(tile: Tile | null): void {
    this.hovered = tile;
  }

  /** What is at this place of the plot. */
  at(x: number, y: number): Hit | null {
    const device = this.devices[Math.floor((y - STRIP) / this.lane)];
    if (!device || x < this.gutter || y < STRIP) return null;
    const at_s = this.left_s() + (x - this.gutter) / this.perSecond;
    const slack_s = 1.5 / this.perSecond;
    const covers = (tile: Tile): boolean =>
      tile.start_s - slack_s <= at_s && at_s <= tile.end_s + slack_s && tile.devices.includes(device.device);
    const planned = this.live.state?.planned.find(covers);
    if (planned) return { tile: planned, device, x, y };
    const { tiles } = this.live;
    for (let place = tiles.length - 1; place >= this.firstFrom(at_s - slack_s); place--) {
      if (covers(tiles[place]!)) return { tile: tiles[place]!, device, x, y };
    }
    return null;
  }

  // Layout.

  private readPaint(): void {
    const style = getComputedStyle(document.documentElement);
    const names = ["card", "ink", "soft", "rule", "lane", "bad", "good", "accent", "load"] as const;
    const colours = names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]);
    this.paint = { ...Object.fromEntries(colours), font: getComputedStyle(document.body).fontFamily } as Paint;
    if (this.width) this.arrange();
  }

  private resize(): void {
    if (this.width === this.place.clientWidth && this.ratio === (window.devicePixelRatio || 1)) return;
    this.width = this.place.clientWidth;
    this.ratio = window.devicePixelRatio || 1;
    this.arrange();
  }

  /** Give each device a lane, and everything its size. */
  private arrange(): void {
    this.devices = this.live.devices;
    this.rowOf = new Map(this.devices.map((device, row) => [device.device, row]));
    this.lane = Math.max(LEAST_LANE, Math.min(MOST_LANE, Math.floor(ROOM / Math.max(1, this.devices.length))));
    this.height = STRIP + this.lane * Math.max(1, this.devices.length) + AXIS;
    this.place.style.height = `${this.height}px`;
    this.window.style.left = `${this.gutter}px`;
    const numRows = this.devices.length;
    for (const sheet of [this.past, this.aside]) sheet.size(this.inner * (1 + MARGIN), this.height, this.ratio, numRows);
    for (const sheet of [this.running, this.marks]) {
      sheet.size(this.inner * (1 + LEAST_MARGIN), this.height, this.ratio, numRows);
    }
    this.drawLanes();
    this.nextAside = null;
    this.isStale = true;
    this.version = -1;
  }

  private get gap(): number {
    return this.lane > 8 ? 2 : this.lane > 5 ? 1 : 0;
  }

  private drawLanes(): void {
    const { lane, lanes } = this;
    lanes.style.top = `${STRIP + this.gap / 2}px`;
    lanes.style.left = `${this.gutter}px`;
    lanes.style.height = `${lane * this.devices.length - this.gap}px`;
    lanes.style.backgroundSize = `100% ${lane}px`;
    lanes.style.backgroundImage = `linear-gradient(var(--lane) ${lane - this.gap}px, transparent 0)`;
    const every = Math.max(1, Math.ceil(13 / lane));
    const named = this.devices.filter((_, row) => row % every === 0);
    lanes.replaceChildren(...named.map((device, place) => this.nameOf(device, place * every)));
  }

  private nameOf(device: Device, row: number): HTMLElement {
    const name = document.createElement("span");
    name.textContent = `${this.width < 560 ? "" : device.kind === "cpu" ? "slot " : "device "}${device.device}`;
    name.style.top = `${row * this.lane}px`;
    name.style.lineHeight = `${this.lane - this.gap}px`;
    return name;
  }

  // Drawing.

  private draw(): void {
    if (!this.live.state || this.width <= this.gutter) return;
    if (this.devices !== this.live.devices && this.hasOtherDevices()) this.arrange();
    const left_s = this.left_s();
    const { perSecond } = this;
    // One of them in a frame of the screen: the marks, what runs, or a part of another view.
    if (this.version !== this.live.version) {
      this.checkPast();
      this.version = this.live.version;
      this.areMarksStale = this.isRunningStale = true;
    } else if (this.areMarksStale) this.drawMarks(left_s);
    else if (this.isRunningStale) this.drawRunning(left_s);
    else if (this.drawAside(left_s) && !this.fits(this.marks, left_s)) this.areMarksStale = this.isRunningStale = true;
    for (const sheet of [this.past, this.running, this.marks]) sheet.lay(left_s, perSecond);
    const now = Math.round((this.live.now_s() - left_s) * perSecond);
    if (now !== this.now) {
      this.now = now;
      this.untilNow.style.width = `${Math.max(0, now)}px`;
      this.nowLine.style.transform = `translateX(${now}px)`;
    }
    this.layFrame(left_s);
  }

  private hasOtherDevices(): boolean {
    const { devices } = this.live;
    const isSame =
      devices.length === this.devices.length &&
      devices.every((device, row) => device.device === this.devices[row]!.device);
    if (isSame) this.devices = devices;
    return !isSame;
  }

  /** Whether a sheet has the scale of the view, and all of it. */
  private fits(sheet: Sheet, left_s: number): boolean {
    const covers = sheet.left_s <= left_s && left_s + this.span_s <= sheet.end_s + 1e-9;
    return covers && Math.abs(sheet.perSecond / this.perSecond - 1) < 1e-6;
  }

  /** The first tile that may end at this time or later; they are in the order of their ends, but for moments. */
  private firstFrom(time_s: number): number {
    const { tiles } = this.live;
    let low = 0;
    let high = tiles.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (tiles[middle]!.end_s < time_s - 1) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** See whether what has ended has to be drawn anew. */
  private checkPast(): void {
    const { tiles } = this.live;
    const isForgotten = tiles[0] !== this.firstPast || tiles.length < this.numPast;
    if (isForgotten) {
      // The oldest are gone, or the server was started again.
      this.firstPast = tiles[0];
      this.numPast = tiles.length;
      this.nextAside = null;
    }
    this.isStale ||= isForgotten || tiles.length - this.numPast > MOST_NEW;
  }

  /** Go on with the sheet of another view, or begin it, if the one that is shown does not fit; returns whether it did. */
  private drawAside(left_s: number): boolean {
    if (this.nextAside === null) {
      if (!this.isStale && this.fits(this.past, left_s)) return true;
      this.isStale = false;
      this.aside.clear(left_s, this.perSecond, this.paint.font);
      this.nextAside = this.firstFrom(left_s);
    }
    const { tiles } = this.live;
    const end_ms = performance.now() + BUDGET_MS;
    do {
      const end = Math.min(tiles.length, this.nextAside + CHUNK);
      for (; this.nextAside < end; this.nextAside++) this.drawTile(this.aside, tiles[this.nextAside]!);
    } while (this.nextAside < tiles.length && performance.now() < end_ms);
    if (this.nextAside < tiles.length) {
      this.aside.flush();
      return false;
    }
    this.aside.show();
    [this.past, this.aside] = [this.aside, this.past];
    this.past.canvas.hidden = false;
    this.aside.canvas.hidden = true;
    this.nextAside = null;
    this.numPast = tiles.length;
    return false;
  }

  private drawTile(sheet: Sheet, tile: Tile): void {
    const { devices } = tile;
    const isDim = this.chosen !== null && !tile.requests.includes(this.chosen);
    if (isDim) sheet.pen.globalAlpha = 0.15;
    for (let place = 0; place < devices.length; place++) {
      const first = this.rowOf.get(devices[place]!);
      if (first === undefined) continue;
      let last = first;
      while (place + 1 < devices.length && this.rowOf.get(devices[place + 1]!) === last + 1) {
        last++;
        place++;
      }
      this.drawRows(sheet, tile, first, last);
    }
    if (isDim) sheet.pen.globalAlpha = 1;
  }

  /** A tile in these rows, which are neighbours. */
  private drawRows(sheet: Sheet, tile: Tile, first: number, last: number): void {
    const span = sheet.span(tile.start_s, tile.end_s, first, last);
    if (!span) return;
    const [left, right] = span;
    const trim = right - left > 3 ? 1 / this.ratio : 0;
    const top = STRIP + first * this.lane + this.gap / 2;
    const tall = (last - first + 1) * this.lane - this.gap;
    if (tile.requests.length === 0) {
      sheet.pen.fillStyle = this.paint.load;
      sheet.pen.fillRect(left, top + tall / 4, right - left - trim, tall / 2);
    } else {
      this.drawStripes(sheet, tile, left, right - trim, top, tall);
    }
  }

  /** A stripe for each request that shares the tile; red below what runs after the deadline. */
  private drawStripes(sheet: Sheet, tile: Tile, left: number, right: number, top: number, tall: number): void {
    const { pen } = sheet;
    const share = tall / tile.requests.length;
    for (let place = 0; place < tile.requests.length; place++) {
      const number = tile.requests[place]!;
      const colour = this.live.colour(number);
      pen.fillStyle = tile.steps ? colour.plain : colour.dark;
      pen.fillRect(left, top + place * share, right - left, share);
      const deadline_s = this.live.requests.get(number)?.deadline_s ?? null;
      if (deadline_s !== null && tile.end_s > deadline_s && share >= 3) {
        const from = Math.max(left, Math.round(sheet.x(deadline_s)));
        const strip = Math.min(3, Math.ceil(share / 3));
        pen.fillStyle = this.paint.bad;
        pen.fillRect(from, top + (place + 1) * share - strip, right - from, strip);
      }
    }
    if (tile.ending && !["done", "stopped"].includes(tile.ending) && tall > 6) this.cross(pen, left, right, top, tall);
    if (this.lane < 14 || right - left < 30 || tile.requests.length > 1) return;
    pen.fillStyle = tile.steps ? this.live.colour(tile.requests[0]!).ink : "white";
    pen.textAlign = "left";
    pen.fillText(`${tile.requests[0]}`, left + 4, top + tall / 2 + 0.5);
  }

  private cross(pen: OffscreenCanvasRenderingContext2D, left: number, right: number, top: number, tall: number): void {
    pen.strokeStyle = this.paint.card;
    pen.lineWidth = 2;
    pen.beginPath();
    pen.moveTo(left, top);
    pen.lineTo(right, top + tall);
    pen.moveTo(left, top + tall);
    pen.lineTo(right, top);
    pen.stroke();
  }

  /** What is planned, pale; times; deadlines. */
  private drawMarks(left_s: number): void {
    const { marks } = this;
    this.areMarksStale = false;
    marks.clear(left_s, this.perSecond, this.paint.font);
    this.drawTimes(left_s);
    for (const tile of this.live.state!.planned) {
      marks.pen.globalAlpha = 0.3;
      this.drawTile(marks, tile);
    }
    marks.pen.globalAlpha = 1;
    this.drawDeadlines(left_s);
    marks.show();
  }

  /** What runs, in full, of which the part until now is shown; and what has ended since the past was drawn. */
  private drawRunning(left_s: number): void {
    const { tiles } = this.live;
    const now_s = this.live.now_s();
    this.isRunningStale = false;
    this.running.clear(left_s, this.perSecond, this.paint.font);
    const first = Math.max(this.numPast, this.firstFrom(left_s));
    for (let place = first; place < tiles.length; place++) this.drawTile(this.running, tiles[place]!);
    for (const tile of this.live.state!.planned) {
      // One that takes longer than predicted is drawn until the next frame of the server.
      if (tile.start_s < now_s + 1) this.drawTile(this.running, { ...tile, end_s: Math.max(tile.end_s, now_s + 1) });
    }
    this.running.show();
  }

  private drawTimes(left_s: number): void {
    const { marks, paint } = this;
    const rough = this.span_s / Math.max(2, this.inner / 90);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((one) => one * power >= rough)! * power;
    const bottom = STRIP + this.lane * this.devices.length;
    marks.pen.textAlign = "center";
    for (let tick = Math.ceil(left_s / step) * step; tick < marks.end_s; tick += step) {
      const x = Math.round(marks.x(tick));
      marks.pen.fillStyle = paint.rule;
      marks.pen.fillRect(x, STRIP, 1, bottom + 3 - STRIP);
      marks.pen.fillStyle = paint.soft;
      marks.pen.fillText(clock(tick, step), x, bottom + AXIS / 2 + 2);
    }
  }

  /** Marks above the lanes: hollow while open, red if missed. The chosen request's goes through, with its arrival. */
  private drawDeadlines(left_s: number): void {
    const { marks, paint } = this;
    const { pen } = marks;
    for (const request of this.live.requests.values()) {
      const { deadline_s } = request;
      const isChosen = request.number === this.chosen;
      if (deadline_s === null || deadline_s < left_s || deadline_s > marks.end_s) continue;
      if (this.chosen !== null && !isChosen) continue;
      const x = marks.x(deadline_s);
      const isOpen = request.finish_s === null;
      const isMissed = isOpen ? request.eta_s > deadline_s : request.on_time === false;
      pen.fillStyle = pen.strokeStyle = isMissed ? paint.bad : isOpen ? paint.soft : paint.good;
      pen.lineWidth = 1.2;
      pen.beginPath();
      pen.moveTo(x - 4, STRIP - 12);
      pen.lineTo(x + 4, STRIP - 12);
      pen.lineTo(x, STRIP - 3);
      pen.closePath();
      if (isOpen) pen.stroke();
      else pen.fill();
      if (isChosen) this.drawLine(x);
    }
    const chosen = this.chosen === null ? undefined : this.live.requests.get(this.chosen);
    if (!chosen) return;
    pen.strokeStyle = paint.soft;
    this.drawLine(marks.x(chosen.arrival_s));
  }

  private drawLine(x: number): void {
    const { pen } = this.marks;
    pen.setLineDash([4, 3]);
    pen.beginPath();
    pen.moveTo(x, STRIP - 3);
    pen.lineTo(x, STRIP + this.lane * this.devices.length);
    pen.stroke();
    pen.setLineDash([]);
  }

  /** Around what is hovered. */
  private layFrame(left_s: number): void {
    const tile = this.hovered;
    const first = tile ? this.rowOf.get(tile.devices[0] ?? -1) : undefined;
    this.frame.hidden = first === undefined;
    if (!tile || first === undefined) return;
    let last = first;
    while (tile.devices.includes(this.devices[last + 1]?.device ?? -1)) last++;
    const { style } = this.frame;
    style.left = `${(tile.start_s - left_s) * this.perSecond}px`;
    style.width = `${Math.max(2, (tile.end_s - tile.start_s) * this.perSecond)}px`;
    style.top = `${STRIP + first * this.lane}px`;
    style.height = `${(last - first + 1) * this.lane}px`;
  }
}

/** Time since the server's start, as "1:02:03" or "2:03.5", with as many digits as the step has. */
function clock(time_s: number, step: number): string {
  const digits = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9));
  const whole = Math.floor(time_s / 3600);
  const minutes = Math.floor((time_s % 3600) / 60);
  const rest = (time_s % 60).toFixed(digits).padStart(digits ? digits + 3 : 2, "0");
  return `${whole ? `${whole}:${String(minutes).padStart(2, "0")}` : minutes}:${rest}`;
}

/** What a tile is, in words. */
export function tileText(tile: Tile, requests: readonly (Request | undefined)[]): string {
  if (!tile.steps) return tile.stage;
  const first = tile.first_step + 1;
  const last = tile.first_step + tile.steps;
  const total = requests[0] ? ` of ${requests[0].steps}` : "";
  return `${first === last ? `step ${first}` : `steps ${first}-${last}`}${total}`;
}
