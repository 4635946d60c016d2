"""The multipart form of `/v1/images/edits`: text fields, pictures, a mask."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request
from PIL.Image import Image
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile

from omnistage.api.context import context_of
from omnistage.api.errors import from_pydantic
from omnistage.api.media import ReadBytes, to_mask
from omnistage.api.openapi import form_body
from omnistage.api.protocol.images import ImageEditForm
from omnistage.contracts.errors import InvalidRequestError, PayloadTooLargeError

_IMAGE_FIELDS = ("image", "image[]")
_MASK_FIELD = "mask"
_MAX_FIELDS = 64
_MAX_FIELD_BYTES = 1024 * 1024
_FILE = {"type": "string", "format": "binary"}

EDIT_FORM_BODY = form_body(
    ImageEditForm,
    files={
        "image": {"type": "array", "items": _FILE, "minItems": 1},
        "image[]": {"type": "array", "items": _FILE, "description": "Another name of `image`."},
        "mask": {**_FILE, "description": "Transparent, or else white, where to repaint."},
    },
    required=["image"],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EditForm:
    """`mask` has the size of the first of `images`."""

    fields: ImageEditForm
    images: list[Image]
    mask: Image | None


async def read_edit_form(request: Request) -> EditForm:
    """Validate the form and decode its pictures. Raises `InvalidRequestError`."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "multipart/form-data":
        raise InvalidRequestError(
            "the body must be a form with content-type multipart/form-data, not "
            f"{ascii(content_type or 'nothing')[:80]}",
            param="content-type",
        )
    async with request.form(
        max_files=context_of(request).settings.max_input_images + 1,
        max_fields=_MAX_FIELDS,
        max_part_size=_MAX_FIELD_BYTES,
    ) as form:
        fields = _text_fields(form)
        images, mask = await _pictures(request, form)
    return EditForm(fields=fields, images=images, mask=mask)


def _text_fields(form: FormData) -> ImageEditForm:
    values: dict[str, str] = {}
    for name, value in form.multi_items():
        if name in (*_IMAGE_FIELDS, _MASK_FIELD):
            continue
        if not isinstance(value, str):
            raise InvalidRequestError("a file was sent where text belongs", param=name[:80])
        if name in values:
            raise InvalidRequestError("the field was sent twice", param=name[:80])
        values[name] = value
    try:
        return ImageEditForm.model_validate(values)
    except ValidationError as error:
        raise from_pydantic(error) from error


async def _pictures(request: Request, form: FormData) -> tuple[list[Image], Image | None]:
    uploads = [(name, value) for name in _IMAGE_FIELDS for value in form.getlist(name)]
    if not uploads:
        raise InvalidRequestError("image: send at least one picture to change", param="image")
    masks = [(_MASK_FIELD, value) for value in form.getlist(_MASK_FIELD)]
    if len(masks) > 1:
        raise InvalidRequestError(f"mask: {len(masks)} were sent; one is taken", param=_MASK_FIELD)
    limit_bytes = context_of(request).settings.max_media_bytes
    readers = [(name, _reader(name, value, limit_bytes)) for name, value in uploads + masks]
    pictures = await context_of(request).pictures.from_uploads(readers)
    if not masks:
        return pictures, None
    images, mask = pictures[:-1], to_mask(pictures[-1])
    if mask.size != images[0].size:
        raise InvalidRequestError(
            f"mask: it is {mask.width}x{mask.height}, the picture "
            f"{images[0].width}x{images[0].height}; both must have one size",
            param=_MASK_FIELD,
        )
    return images, mask


def _reader(name: str, value: UploadFile | str, limit_bytes: int) -> ReadBytes:
    if isinstance(value, str):
        raise InvalidRequestError(f"{name}: text was sent where a file belongs", param=name)
    if value.size is not None and value.size > limit_bytes:
        raise PayloadTooLargeError(
            f"{name}: the file has {value.size} bytes; at most {limit_bytes} are taken", param=name
        )
    return value.read
