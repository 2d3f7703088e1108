"""The picture of the demo: a few shapes on a plain ground, drawn here for who has no clone.

A clone keeps it as `shapes.png` beside the weights that can see it, for `k3 ask --image`.
"""

import io

from PIL import Image, ImageDraw

SIZE = (448, 336)


def draw_picture() -> bytes:
    """Gives a PNG with a red circle, a blue square and a green triangle."""
    image = Image.new("RGB", SIZE, (240, 240, 236))
    draw = ImageDraw.Draw(image)
    draw.ellipse((45, 60, 141, 156), fill=(214, 48, 49))
    draw.rectangle((186, 160, 270, 244), fill=(42, 96, 200))
    draw.polygon([(365, 60), (317, 146), (413, 146)], fill=(46, 160, 67))
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=False)
    return stream.getvalue()
