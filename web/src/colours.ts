/** The colours of requests: the hue is that of the size, the shade distinguishes neighbours. As `report/palette.py`. */

const HUES = ["#56B4E9", "#009E73", "#F0C419", "#E69F00", "#D55E00", "#CC79A7", "#0072B2"];
const SHADES = [0, 0.38, 0.2];
export const OTHERS = "#9aa1a9";

const mix = (hue: string, other: number, share: number): string => {
  const parts = [1, 3, 5].map((at) => {
    const part = Number.parseInt(hue.slice(at, at + 2), 16);
    return Math.round(part + (other - part) * share);
  });
  return `#${parts.map((part) => part.toString(16).padStart(2, "0")).join("")}`;
};

export interface Colour {
  /** Of steps. */
  readonly plain: string;
  /** Of stages without steps. */
  readonly dark: string;
  /** Reads well on `plain`. */
  readonly ink: string;
}

const inkOn = (hex: string): string => {
  const luminance = [0.2126, 0.7152, 0.0722].reduce((sum, weight, place) => {
    return sum + weight * (Number.parseInt(hex.slice(1 + 2 * place, 3 + 2 * place), 16) / 255) ** 2.2;
  }, 0);
  return luminance > 0.18 ? "black" : "white";
};

const colour = (plain: string): Colour => ({ plain, dark: mix(plain, 0, 0.35), ink: inkOn(plain) });
const ALL = HUES.map((hue) => SHADES.map((shade) => colour(mix(hue, 255, shade))));
export const UNKNOWN = colour(OTHERS);

const KEPT = "tilework-sizes";

/** Sizes get hues in the order in which they are first seen, and have them again when the page is loaded anew. */
export class Palette {
  private readonly places = new Map<string, number>(JSON.parse(sessionStorage.getItem(KEPT) ?? "[]"));
  private readonly seen = new Set<string>();

  of(size: string, number: number): Colour {
    let place = this.places.get(size);
    if (place === undefined) {
      this.places.set(size, (place = this.places.size % HUES.length));
      sessionStorage.setItem(KEPT, JSON.stringify([...this.places]));
    }
    this.seen.add(size);
    return ALL[place]![number % SHADES.length]!;
  }

  legend(): [string, string][] {
    return [...this.seen].slice(0, HUES.length).map((size) => [size, HUES[this.places.get(size)!]!]);
  }
}
