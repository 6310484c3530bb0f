/** The state of the server as this page has it: the latest frame, and what it has kept of the past. */

import { Refused, call, events, keySet } from "./api";
import { Palette, UNKNOWN, type Colour } from "./colours";
import type { Device, LiveState, Request, Tile } from "./state";

const MOST_TILES = 40_000;
const RETRY_MS = 2_000;

export class Live {
  state: LiveState | null = null;
  devices: Device[] = [];
  /** Ended tiles, by their end. */
  tiles: Tile[] = [];
  requests = new Map<number, Request>();
  /** Why there is no stream now. */
  trouble = "";
  /** Counts frames. */
  version = 0;
  readonly palette = new Palette();
  private readonly listeners = new Set<() => void>();
  private offset_s = Number.NEGATIVE_INFINITY;

  subscribe(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** The server's clock now, by the frames that came with the least delay. */
  now_s(): number {
    return performance.now() / 1e3 + this.offset_s;
  }

  colour(number: number): Colour {
    const request = this.requests.get(number);
    return request ? this.palette.of(request.size, request.number) : UNKNOWN;
  }

  /** Follow the server for as long as the page is there. */
  async follow(): Promise<never> {
    for (;;) {
      try {
        const answer = await call("/v1/live", { headers: { Accept: "text/event-stream" } });
        this.begin();
        for await (const state of events<LiveState>(answer)) this.take(state);
        this.fail("The server has ended the stream.");
      } catch (error) {
        this.fail(error instanceof Refused ? error.message : "The server does not answer.");
      }
      await new Promise<void>((resolve) => {
        const done = (): void => {
          clearTimeout(timer);
          keySet.delete(done);
          resolve();
        };
        const timer = setTimeout(done, RETRY_MS);
        keySet.add(done);
      });
    }
  }

  take(state: LiveState): void {
    this.trouble = "";
    const offset_s = state.now_s - performance.now() / 1e3;
    this.offset_s = Math.max(offset_s, this.offset_s - 0.002);
    if (state.devices) this.devices = state.devices;
    for (const request of [...state.requests, ...state.ended]) {
      this.palette.of(request.size, request.number);
      this.requests.set(request.number, request);
    }
    for (const tile of state.tiles) this.tiles.push(tile);
    if (this.tiles.length > MOST_TILES) this.forget();
    this.state = state;
    this.tell();
  }

  /** A server that was restarted begins its numbers and its clock anew: nothing of the last one is kept. */
  private begin(): void {
    this.tiles = [];
    this.requests.clear();
    this.offset_s = Number.NEGATIVE_INFINITY;
  }

  private fail(trouble: string): void {
    this.trouble = trouble;
    this.tell();
  }

  private forget(): void {
    this.tiles = this.tiles.slice(MOST_TILES / 4);
    const oldest_s = this.tiles[0]!.start_s;
    for (const [number, request] of this.requests) {
      if (request.finish_s !== null && request.finish_s < oldest_s) this.requests.delete(number);
    }
  }

  private tell(): void {
    this.version++;
    // One after another, so that each has a frame of the screen to itself.
    [...this.listeners].forEach((listener, place) => setTimeout(() => this.listeners.has(listener) && listener(), 20 * place));
  }
}
