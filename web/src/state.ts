/** What `/v1/live` says, as `schema/live.py` states it. Times are in seconds on the server's clock. */

export interface Tile {
  start_s: number;
  end_s: number;
  devices: number[];
  stage: string;
  requests: number[];
  first_step: number;
  steps: number;
  ending: string;
}

export interface Request {
  number: number;
  uid: string;
  model: string;
  size: string;
  steps: number;
  class: string;
  tenant: string;
  arrival_s: number;
  deadline_s: number | null;
  is_promise: boolean;
  status: string;
  steps_done: number;
  eta_s: number;
  finish_s: number | null;
  on_time: boolean | null;
}

export interface Component {
  models: string[];
  name: string;
  bytes: number;
}

export interface Card {
  busy: number | null;
  used_bytes: number | null;
  worker_bytes: number | null;
  celsius: number | null;
  watts: number | null;
  limit_watts: number | null;
  hertz: number | null;
  slowed_by: string[] | null;
}

export interface Device {
  device: number;
  node: number;
  kind: "accelerator" | "cpu";
  used_bytes: number | null;
  weights_bytes: number | null;
  weights_free_bytes: number | null;
  components: Component[];
  cards: Card[];
}

export interface Attained {
  by: "class" | "tenant" | "model";
  name: string;
  on_time: number;
  late: number;
  others: number;
  refused: number;
  recent_on_time: number;
  recent_late: number;
}

export interface LiveState {
  now_s: number;
  policy: string;
  backlog_s: number;
  num_open: number;
  num_own: number;
  missed: number;
  planned: Tile[];
  tiles: Tile[];
  requests: Request[];
  ended: Request[];
  attainment: Attained[];
  attainment_window_s: number;
  devices: Device[] | null;
}

export type CacheKind = "patch" | "image" | "fbcache" | "taylorseer";

/** The number of a kind of cache; `usual` are those to compare. */
export interface CacheSetting {
  name: "threshold" | "interval";
  default: number;
  least: number;
  most: number;
  usual: number[];
}

/** A model of the server's start that cannot run there. */
export interface NotServed {
  id: string;
  reason: string;
}

/** What is true of one model, of its card in `/v1/models`. */
export interface Model {
  id: string;
  tilework: {
    default_size: string;
    default_steps: number;
    max_side: number;
    side_multiple: number;
    default_frames: number;
    max_frames: number;
    default_fps: number | null;
    makes_videos: boolean;
    default_slo: string | null;
    exact: boolean;
    cache_settings: Partial<Record<CacheKind, CacheSetting>>;
    serves_on: number[];
    devices: number[];
    on_host: boolean;
    loras: string[];
    words: Record<string, string[]> | null;
    pictures: { name: string; required: boolean; most: number; is_mask: boolean; is_clip: boolean }[];
  };
}

export interface Segment {
  stage: string;
  devices: number[];
  steps: number;
  start_s: number;
  end_s: number;
  batch: number;
  load_s: number;
}

/** What the cache of a request did. */
export interface CacheUse {
  kind: CacheKind;
  threshold: number | null;
  interval: number | null;
  saving: number;
  off: string | null;
}

export interface Timeline {
  uid: string;
  seed: number;
  eta_s: number;
  latency_s: number;
  queue_s: number | null;
  slo_s: number | null;
  slo_source: string | null;
  on_time: boolean | null;
  warnings: string[];
  cache: CacheUse | null;
  segments: Segment[];
}

export interface Decision {
  uid: string;
  at_s: number;
  kind: string;
  text: string;
  devices: number[];
  degree: number | null;
  steps: number[] | null;
}

/** What `/v1/plan` says, as `schema/plan.py` states it. */

export interface PlanPoint {
  devices: number;
  share: number;
  low: number;
  high: number;
  verdict: "meets" | "misses" | "unsure" | "open";
  is_whole: boolean;
}

export interface PlanResult {
  devices: number | null;
  devices_in_the_mean: number | null;
  points: PlanPoint[];
  uses: { pipeline: string; stage: string; devices: number; degrees: Record<string, number> }[];
  error: { points: number; simulated: number; live: number; num_requests: number };
  wall_s: number;
}

export interface PlanState {
  status: "running" | "done" | "failed";
  target: number;
  devices_now: number;
  num_requests: number;
  num_due: number;
  span_s: number;
  simulations: number;
  result: PlanResult | null;
  error: string | null;
}
