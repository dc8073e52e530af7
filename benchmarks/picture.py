"""A picture in SVG, and what is drawn in it."""

import html

COLOURS = ("#0b6e4f", "#2a78c2", "#c2572a", "#7a4fa3", "#8a8a8a", "#b8a100")


class Picture:
    """Positions are pixels from the upper left corner."""

    def __init__(self, width, height):
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
                      f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
                      f'<rect width="{width}" height="{height}" fill="white"/>']

    def text(self, x, y, text, anchor="start", size=12, colour="#222"):
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">'
                          f'{html.escape(text)}</text>')

    def upright_text(self, x, y, text):
        self.parts.append(f'<text transform="translate({x} {y}) rotate(-90)" text-anchor="middle">'
                          f'{html.escape(text)}</text>')

    def line(self, points, colour, width=1.0):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')

    def dot(self, x, y, colour):
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}"/>')

    def bar(self, x, y, width, height, colour):
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>')

    def save(self, path):
        with open(path, "w") as file:
            file.write("\n".join([*self.parts, "</svg>"]) + "\n")
