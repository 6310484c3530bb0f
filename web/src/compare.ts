/** Pictures of one request with a cache and without, one after the other, and how much they differ. */

import { run, settingOf, type Cache, type Run, type Wish } from "./run";

export interface Compared {
  run: Run;
  /** Against the picture without a cache: infinite if they are equal, null if that is not known. */
  psnr_db: number | null;
}

/** No cache, and the usual values of the one that is wished for. */
export function choices({ model, cache }: Wish): Cache[] {
  const { name } = cache!;
  const usual = settingOf(model, name)!.usual;
  return [{ name: "off", value: null }, ...usual.map((value) => ({ name, value }))];
}

/** Make the picture with each of the `choices`; the first that is not done ends it. All have the seed of the first. */
export async function compare(wish: Wish, change: (all: Compared[]) => void, signal: AbortSignal): Promise<void> {
  const all: Compared[] = [];
  let { seed } = wish;
  let plain: Promise<Pixels[]> | undefined;
  for (const [place, cache] of choices(wish).entries()) {
    const put = (part: Partial<Compared>): void => {
      all[place] = { ...all[place]!, ...part };
      change([...all]);
    };
    await run({ ...wish, seed, cache, isCompared: true }, (now) => put({ run: now, psnr_db: null }), signal);
    const { state, frames, timeline } = all[place]!.run;
    if (state !== "done") return;
    seed ??= timeline!.seed;
    if (plain) put({ psnr_db: psnr_db(await Promise.all(frames.map(pixels)), await plain) });
    plain ??= Promise.all(frames.map(pixels));
  }
}

type Pixels = Uint8ClampedArray;

/** Of a picture: red, green, blue and opacity. */
async function pixels(url: string): Promise<Pixels> {
  const image = new Image();
  image.src = url;
  await image.decode();
  const pen = new OffscreenCanvas(image.naturalWidth, image.naturalHeight).getContext("2d")!;
  pen.drawImage(image, 0, 0);
  return pen.getImageData(0, 0, image.naturalWidth, image.naturalHeight).data;
}

/** Peak signal-to-noise ratio of pictures, or frames, of 8 bits. As `report/similarity.py`. */
function psnr_db(pictures: Pixels[], references: Pixels[]): number {
  let sum = 0;
  let count = 0;
  for (const [place, picture] of pictures.entries()) {
    const reference = references[place]!;
    for (let at = 0; at < picture.length; at++) if (at % 4 !== 3) sum += (picture[at]! - reference[at]!) ** 2;
    count += (picture.length / 4) * 3;
  }
  return 10 * Math.log10((255 ** 2 * count) / sum);
}
