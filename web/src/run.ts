/** One call of the playground, from its fields to its result. */

import { Refused, call, events, get, post } from "./api";
import type { CacheKind, CacheSetting, Model, Timeline } from "./state";

/** `value` is the threshold or the interval; null: the server's. */
export interface Cache {
  name: CacheKind | "off" | "if_late";
  value: number | null;
}

export interface Wish {
  model: Model;
  prompt: string;
  width: number;
  height: number;
  steps: number;
  seed: number | null;
  frames: number | null;
  slo_s: number | null;
  onMiss: "best_effort" | "reject" | "drop";
  /** Null if it can have none. */
  cache: Cache | null;
  /** Whether it is compared with others: then it has no previews, which take time, and a clip comes as frames. */
  isCompared: boolean;
  /** Data URLs by the name of the model's input. */
  pictures: Record<string, string>;
}

export interface Run {
  wish: Wish;
  state: "asking" | "queued" | "running" | "paused" | "done" | "failed" | "cancelled";
  uid: string | null;
  step: number;
  eta_s: number | null;
  began_ms: number;
  /** A URL of a small picture, while it runs. */
  preview: string | null;
  /** URLs of pictures, several if it is a clip without a file. */
  frames: string[];
  /** The URL of a video. */
  video: string | null;
  timeline: Timeline | null;
  trouble: string;
  /** The earliest deadline that could be met, if it was refused. */
  earliest_s: number | null;
}

interface Event {
  type: string;
  uid?: string;
  state?: Run["state"];
  step?: number;
  eta_s?: number | null;
  output_format?: string;
  b64_json?: string;
  reason?: string;
  timeline?: Timeline;
  tilework?: Timeline;
  error?: { message: string };
}

interface Video {
  id: string;
  status: string;
  error: { message: string } | null;
  tilework: { timeline: Timeline | null };
}

export const hasEnded = ({ state }: Run): boolean => ["done", "failed", "cancelled"].includes(state);

export const begun = (wish: Wish): Run => ({
  wish,
  state: "asking",
  uid: null,
  step: 0,
  eta_s: null,
  began_ms: performance.now(),
  preview: null,
  frames: [],
  video: null,
  timeline: null,
  trouble: "",
  earliest_s: null,
});

/** Make what is wished for; `change` is told of each change of the run. Aborting cancels it. */
export async function run(wish: Wish, change: (run: Run) => void, signal: AbortSignal): Promise<void> {
  let now = begun(wish);
  const put = (part: Partial<Run>): void => change((now = { ...now, ...part }));
  try {
    if (wish.model.tilework.makes_videos && wish.frames !== 1 && !wish.isCompared) await video(wish, put, signal);
    else await pictures(wish, put, () => now, signal);
  } catch (error) {
    if (signal.aborted) put({ state: "cancelled" });
    else if (error instanceof Refused) {
      const earliest = error.details["earliest_s"];
      put({ state: "failed", trouble: error.message, earliest_s: typeof earliest === "number" ? earliest : null });
    } else put({ state: "failed", trouble: "The connection to the server broke." });
  }
}

function fields(wish: Wish): Record<string, unknown> {
  return {
    model: wish.model.id,
    prompt: wish.prompt,
    size: `${wish.width}x${wish.height}`,
    num_inference_steps: wish.steps,
    ...(wish.isCompared ? {} : { preview_every_s: 0.4 }),
    ...(wish.cache === null ? {} : cacheFields(wish.model, wish.cache)),
    ...(wish.seed === null ? {} : { seed: wish.seed }),
    ...(wish.frames === null ? {} : { num_frames: wish.frames }),
    ...(wish.slo_s === null ? {} : { slo_s: wish.slo_s, on_miss: wish.onMiss }),
  };
}

function cacheFields(model: Model, { name, value }: Cache): Record<string, unknown> {
  const setting = settingOf(model, name);
  return { cache: name, ...(setting && value !== null ? { [`cache_${setting.name}`]: value } : {}) };
}

/** Undefined if it is off. A deadline buys the cache of patches. */
export const settingOf = (model: Model, name: Cache["name"]): CacheSetting | undefined =>
  name === "off" ? undefined : model.tilework.cache_settings[name === "if_late" ? "patch" : name];

async function pictures(wish: Wish, put: (part: Partial<Run>) => void, now: () => Run, signal: AbortSignal): Promise<void> {
  const body = { ...fields(wish), ...wish.pictures, stream: true, tilework_events: true, output_format: "png" };
  const answer = await post("/v1/images/generations", body, signal);
  put({ uid: answer.headers.get("x-request-id"), state: "queued" });
  for await (const event of events<Event>(answer)) {
    if (event.type === "image_generation.completed") {
      const url = urlOf(event.b64_json!, event.output_format!);
      put({ frames: [...now().frames, url], timeline: event.tilework ?? null });
    } else follow(event, put);
  }
}

async function video(wish: Wish, put: (part: Partial<Run>) => void, signal: AbortSignal): Promise<void> {
  const { pictures: given, ...rest } = wish;
  const main = wish.model.tilework.pictures.find((one) => !one.is_mask && !one.is_clip)?.name;
  const named = Object.entries(given).map(([name, url]) => [name === main ? "input_reference" : name, url]);
  const asked = await post("/v1/videos", { ...fields({ ...rest, pictures: {} }), ...Object.fromEntries(named) }, signal);
  const { id } = (await asked.json()) as Video;
  put({ uid: id, state: "queued" });
  const cancel = (): void => void call(`/v1/videos/${id}`, { method: "DELETE" }).catch(() => undefined);
  signal.addEventListener("abort", cancel);
  const told = await call(`/v1/requests/${id}/events`, { signal });
  for await (const event of events<Event>(told)) follow(event, put);
  signal.removeEventListener("abort", cancel);
  const job = await get<Video>(`/v1/videos/${id}`);
  if (job.status !== "completed") throw new Refused(500, job.error?.message ?? "It has failed.");
  const file = await (await call(`/v1/videos/${id}/content`)).blob();
  put({ video: URL.createObjectURL(file), timeline: job.tilework.timeline, state: "done" });
}

function follow(event: Event, put: (part: Partial<Run>) => void): void {
  switch (event.type) {
    case "tilework.accepted":
      return put({ eta_s: event.eta_s ?? null });
    case "tilework.progress":
      return put({ state: event.state === "done" ? "running" : event.state!, step: event.step!, eta_s: event.eta_s ?? null });
    case "tilework.preview":
      return put({ preview: urlOf(event.b64_json!, event.output_format!), step: event.step! });
    case "tilework.done":
      return put({ state: "done", timeline: event.timeline ?? null });
    case "tilework.cancelled":
      return put({ state: "cancelled", trouble: event.reason ?? "" });
    case "tilework.failed":
      return put({ state: "failed", trouble: event.reason ?? "" });
    case "error":
      return put({ state: "failed", trouble: event.error!.message });
  }
}

const urlOf = (base64: string, format: string): string => `data:image/${format};base64,${base64}`;
